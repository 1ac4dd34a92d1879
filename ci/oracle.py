#!/usr/bin/env python3
"""Runs dsacore over the oracle's cases and over generated ones at full size; tests/oracle/check.py judges every output.

Options of the generated cases form a pairwise design: every two values of two different options meet in a case at least once.
Each case runs on the reference and the cpu backend, and with --dcp D wherever D divides the heads.

    python ci/oracle.py --part ci       # a share that takes at most 5 minutes on 2 cores
    python ci/oracle.py --part full     # everything; the log is kept in bench/results
    python ci/oracle.py --part big      # an MLA cache above 4 GiB, and 1M tokens: 18 GiB of memory, alone on the machine
"""
import argparse
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ORACLE = ROOT / "tests" / "oracle"
OPTIONS = {
    "heads": ["6", "12", "24", "96"],
    "kv": ["fp8_ds_mla", "fp8", "nvfp4_ds_mla"],
    "index": ["fp8", "mxfp4"],
    "q": ["1", "2", "4", "8"],
    "context": ["1", "1-64", "1-2100", "1-32768"],
    "page": ["--page 64", "--page 64 --index-table", "--page 2048 --stride-rows 6144", "--page 128 --pitch-pad 24"],
    "adversarial": ["", "--adversarial"],
    "rows": ["", "--slots mixed --pad-requests 1", "--slots negative --k-norm bf16 --no-k-bias"],
}


def pairwise(options):
    """Greedy covering design: rows of values such that every pair of values of two options occurs in a row."""
    names = list(options)
    open_ = {(i, a, j, b) for i, j in itertools.combinations(range(len(names)), 2)
             for a in options[names[i]] for b in options[names[j]]}
    rows = []
    while open_:
        i, a, j, b = min(open_)
        row = {i: a, j: b}
        for k in range(len(names)):
            if k in row:
                continue
            def gain(value):
                return sum(((m, row[m], k, value) if m < k else (k, value, m, row[m])) in open_ for m in row)
            row[k] = max(options[names[k]], key=gain)
        open_ -= {(m, row[m], n, row[n]) for m, n in itertools.combinations(range(len(names)), 2)}
        rows.append({names[k]: row[k] for k in row})
    return rows


class Runner:
    def __init__(self, binary, work):
        self.binary, self.work, self.failed, self.done = binary, work, 0, 0

    def command(self, *args):
        return subprocess.run([str(a) for a in args], capture_output=True, text=True)

    def judge(self, name, layer, step, backend, dcp):
        extra = ("--dcp", str(dcp), "--interleave", "3" if dcp == 4 else "1", "--partial", "proj" if dcp == 2 else "bf16") if dcp > 1 else ()
        out = self.work / "out.safetensors"
        started = time.monotonic()
        run = self.command(self.binary, "run", "--layer", layer, "--step", step, "--out", out, "--dump", "all", "--backend", backend, *extra)
        ran = time.monotonic() - started
        if run.returncode == 0:
            check = self.command(sys.executable, ORACLE / "check.py", out, "--layer", layer, "--step", step, *extra)
            text, ok = check.stdout + check.stderr, check.returncode == 0
        else:
            text, ok = run.stdout + run.stderr, False
        self.done += 1
        self.failed += not ok
        print(f"{'PASS' if ok else 'FAIL'} {name} {backend} {' '.join(extra)} (run {ran:.1f} s, all {time.monotonic() - started:.1f} s)",
              flush=True)
        if not ok:
            print(text, flush=True)
        out.unlink(missing_ok=True)

    def everywhere(self, name, layer, step, heads, ranks=(2, 4, 8), backends=("reference", "cpu")):
        for backend in backends:
            self.judge(name, layer, step, backend, 1)
            for d in ranks:
                if heads % d == 0:
                    self.judge(name, layer, step, backend, d)

    def generate(self, *args):
        case = self.work / "case"
        shutil.rmtree(case, ignore_errors=True)
        made = self.command(sys.executable, ORACLE / "make_case.py", "--out", case, *args)
        if made.returncode != 0:
            raise SystemExit(f"make_case.py {' '.join(args)}: {made.stderr}")
        return case / "layer.safetensors", case / "step.safetensors"


def small_cases(runner):
    for folder in sorted((ORACLE / "cases").iterdir()):
        if folder.is_dir():
            runner.everywhere(folder.name, folder / "layer.safetensors", folder / "step.safetensors", 2, ranks=(2,))
    text = ROOT / "examples" / "text"
    runner.everywhere("text", text / "layer.safetensors", text / "step.safetensors", 4, ranks=(2, 4))


def arguments(row, seed):
    q = int(row["q"])
    batch = max(8, 2 * q)
    return (f"--seed {seed} --heads {row['heads']} --kv-format {row['kv']} --index-format {row['index']} --q {q} --batch {batch} "
            f"--context {row['context']} {row['page']} {row['adversarial']} {row['rows']}").split()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--part", choices=("ci", "full", "big"), default="ci")
    ap.add_argument("--binary", default=str(ROOT / "build" / "cpu" / "cli" / "dsacore"))
    ap.add_argument("--seconds", type=float, default=240, help="ci: start no further case after this long")
    a = ap.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as work:
        runner = Runner(a.binary, pathlib.Path(work))
        if a.part == "big":
            args = "--seed 5 --heads 12 --batch 2 --context 3000,70 --spare-pages 103000".split()
            runner.everywhere("cache above 4 GiB", *runner.generate(*args), 12, ranks=())
            args = "--seed 6 --heads 12 --batch 1 --context 1048576".split()
            runner.everywhere("1M tokens", *runner.generate(*args), 12, ranks=(2,))
        else:
            small_cases(runner)
            rows = pairwise(OPTIONS)
            print(f"{len(rows)} generated cases cover every pair of values", flush=True)
            for seed, row in enumerate(rows):
                if a.part == "ci" and time.monotonic() - started > a.seconds:
                    print(f"the first {seed} of {len(rows)} generated cases; `--part full` runs all")
                    break
                args = arguments(row, seed)
                # In CI each generated case runs on one backend and one D, in turn.
                files = runner.generate(*args)
                name = " ".join(args)
                if a.part == "full":
                    runner.everywhere(name, *files, int(row["heads"]))
                else:
                    d = (1, 2, 4, 8)[seed % 4]
                    runner.judge(name, *files, "cpu" if seed % 3 else "reference", d if int(row["heads"]) % d == 0 else 1)
    print(f"oracle: {runner.done - runner.failed} passed, {runner.failed} failed in {time.monotonic() - started:.0f} s")
    return 1 if runner.failed or not runner.done else 0


if __name__ == "__main__":
    sys.exit(main())
