#!/usr/bin/env python3
"""Makes the seeds of the file fuzzers from real files: python make_corpus.py CASES_FOLDER

A seed is a file's header and four bytes that stand for its data (see fuzz_support.h).
"""
import pathlib
import sys


def main(cases):
    here = pathlib.Path(__file__).parent / "corpus"
    for target, name in (("fuzz_layer_file", "layer"), ("fuzz_step_file", "step"), ("fuzz_out_file", "expected")):
        folder = here / target
        folder.mkdir(parents=True, exist_ok=True)
        for case in sorted(pathlib.Path(cases).iterdir()):
            path = case / f"{name}.safetensors"
            if not path.is_file():
                continue
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            (folder / case.name).write_bytes(data[:end] + (len(data) - end | 1 << 31).to_bytes(4, "little"))


main(sys.argv[1])
