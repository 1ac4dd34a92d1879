#!/usr/bin/env python3
"""Who may include whom (HACKING.md, "Include rules"). Prints each offence and ends with 1 where there is one."""
import pathlib
import re
import sys

# Folder -> the project folders whose headers it may include. The longest matching folder name counts.
ALLOWED = {
    "include/dsacore": {"dsacore"},
    "src/format": {"dsacore", "format"},
    "src/stages": {"dsacore", "format", "stages"},
    "src/threads": {"threads"},
    "src/memory": {"dsacore", "memory"},
    "src/plan": {"dsacore", "stages", "threads", "memory", "plan"},
    "src/backends/reference": {"dsacore", "format", "stages", "plan/registry.h", "threads", "backends/reference"},
    "src/backends/cpu": {"dsacore", "format", "stages", "plan/registry.h", "threads", "backends/cpu", "hwy"},
    "src/backends/cuda": {"dsacore", "format", "stages", "plan/registry.h", "plan/device.h", "plan/pool.h", "plan/tracer.h", "memory", "threads", "backends/cuda"},
    "src/transport": {"dsacore", "format/mailbox.h", "memory", "transport"},
    "src/layer": {"dsacore", "format", "stages", "plan", "threads", "memory", "transport", "layer", "commit.h"},
    "src/io": {"dsacore", "format", "memory", "io"},
    # The driver also reruns single stages, and measures the operation that floors are counted with.
    "src/driver": {"dsacore", "format", "stages", "plan", "threads", "memory", "layer", "io", "driver", "backends/cpu/bf16_ops.h"},
    "cli": {"dsacore", "io", "driver", "plan", "cli"},
}
OWN = ("dsacore/", "format/", "stages/", "threads/", "plan/", "memory/", "backends/", "transport/", "layer/", "io/", "driver/", "cli/")
HIGHWAY_ONLY_IN = "src/backends/cpu"
CUDA = re.compile(r"^cuda|^cupti|^cub/|^thrust/|^cute/|^cutlass/")


def folder_of(path):
    fits = [f for f in ALLOWED if str(path).startswith(f + "/")]
    return max(fits, key=len) if fits else None


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    bad = 0
    for path in sorted(p for d in ("include", "src", "cli") for p in (root / d).rglob("*") if p.suffix in (".h", ".cpp", ".cc", ".cu", ".cuh")):
        name = path.relative_to(root)
        folder = folder_of(name)
        if folder is None:
            print(f"{name}: in no folder that the rules know")
            bad += 1
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            m = re.match(r'\s*#include\s+([<"])([^>"]+)[>"]', line)
            if not m:
                continue
            header = m[2]
            wrong = None
            if header.startswith(OWN):
                if not any(header == a or header.startswith(a + "/") for a in ALLOWED[folder]):
                    wrong = f"{folder} may include {', '.join(sorted(ALLOWED[folder]))}"
            elif header.startswith("hwy/") and folder != HIGHWAY_ONLY_IN:
                wrong = f"Highway is used in {HIGHWAY_ONLY_IN} alone"
            elif header.startswith(("tbb/", "oneapi/")) and folder != "src/threads":
                wrong = "oneTBB is used in src/threads alone"
            elif CUDA.match(header) and folder != "src/backends/cuda":
                wrong = "CUDA headers belong to a CUDA backend"
            elif folder == "include/dsacore" and m[1] == '"':
                wrong = "public headers include the standard library and each other"
            if wrong:
                print(f"{name}:{number}: includes {header}: {wrong}")
                bad += 1
    print("include rules: " + ("kept" if not bad else f"{bad} offences"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
