#!/usr/bin/env python3
"""Runs dsacore over the oracle's cases and over generated ones at full size; tests/oracle/check.py judges every output.

Options of the generated cases form a pairwise design: every two values of two different options meet in a case at least once.
Each case runs on the reference and the cpu backend, and with --dcp D wherever D divides the heads; the parts for a GPU run the
cuda backend.

    python ci/oracle.py --part ci         # a share that takes at most 5 minutes on 2 cores
    python ci/oracle.py --part full       # everything; the log is kept in bench/results
    python ci/oracle.py --part big        # an MLA cache above 4 GiB, and 1M tokens: 18 GiB of memory, alone on the machine
    python ci/oracle.py --part cuda --binary dsacore --jobs 12       # on a machine with a GPU; --gpus N spreads over several
    python ci/oracle.py --part cuda-big --binary dsacore --jobs 3    # and physical rows above 2^24: 60 GiB of memory
"""
import argparse
import concurrent.futures
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
CUDA_OPTIONS = {**OPTIONS, "heads": ["6", "12", "24", "48", "96"], "context": ["1", "1-64", "1-2100", "1-32768", "1-131072"]}


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
    """Makes and judges cases, `jobs` of them at once, each in a folder of its own."""

    def __init__(self, binary, work, jobs=1, gpus=1):
        self.binary, self.work, self.gpus, self.failed, self.done, self.waiting = binary, work, gpus, 0, 0, []
        self.pool = concurrent.futures.ThreadPoolExecutor(jobs)
        # Beside each other, each keeps to itself.
        self.environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", DSACORE_THREADS="2") if jobs > 1 else dict(os.environ)

    def command(self, number, *args):
        environment = dict(self.environment, CUDA_VISIBLE_DEVICES=str(number % self.gpus)) if self.gpus > 1 else self.environment
        return subprocess.run([str(a) for a in args], capture_output=True, text=True, env=environment)

    def judge(self, number, work, name, layer, step, backend, dcp=1):
        extra = ("--dcp", str(dcp), "--interleave", "3" if dcp == 4 else "1", "--partial", "proj" if dcp == 2 else "bf16") if dcp > 1 else ()
        out = work / "out.safetensors"
        started = time.monotonic()
        run = self.command(number, self.binary, "run", "--layer", layer, "--step", step, "--out", out, "--dump", "all", "--backend", backend,
                           *extra)
        ran = time.monotonic() - started
        if run.returncode == 0:
            check = self.command(number, sys.executable, ORACLE / "check.py", out, "--layer", layer, "--step", step,
                                 "--backend", "cuda" if backend == "cuda" else "cpu", *extra)
            text, ok = check.stdout + check.stderr, check.returncode == 0
        else:
            text, ok = run.stdout + run.stderr, False
        out.unlink(missing_ok=True)
        verdict = f"{'PASS' if ok else 'FAIL'} {name} {backend} {' '.join(extra)} (run {ran:.1f} s, all {time.monotonic() - started:.1f} s)"
        print(verdict if ok else f"{verdict}\n{text}", flush=True)
        return ok

    def run(self, number, name, files, make, ways):
        """One case, which lies in `files` or is made by make_case.py from the arguments `make`, in all `ways`: (backend, D)."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            work = pathlib.Path(folder)
            if files is None:
                made = self.command(number, sys.executable, ORACLE / "make_case.py", "--out", work, *make)
                if made.returncode != 0:
                    print(f"FAIL make_case.py {' '.join(make)}\n{made.stderr}", flush=True)
                    return [False] * len(ways)
                files = (work / "layer.safetensors", work / "step.safetensors")
            return [self.judge(number, work, name, *files, *way) for way in ways]

    def add(self, name, ways, files=None, make=()):
        self.waiting.append(self.pool.submit(self.run, len(self.waiting), name, files, make, ways))

    def finish(self):
        for case in self.waiting:
            passed = case.result()
            self.done += len(passed)
            self.failed += passed.count(False)
        self.waiting.clear()


def ways_of(backends, heads, ranks=(2, 4, 8)):
    """Every backend alone, and where it can with each number of ranks that divides the heads."""
    return [(b, d) for b in backends for d in (1, *ranks) if d == 1 or (heads % d == 0 and b != "cuda")]


def small_cases(runner, backends):
    for folder in sorted((ORACLE / "cases").iterdir()):
        if folder.is_dir():
            runner.add(folder.name, ways_of(backends, 2, (2,)), (folder / "layer.safetensors", folder / "step.safetensors"))
    text = ROOT / "examples" / "text"
    runner.add("text", ways_of(backends, 4, (2, 4)), (text / "layer.safetensors", text / "step.safetensors"))


def big_cases(runner, backends):
    def add(name, ranks, arguments):
        runner.add(name, ways_of(backends, 12, ranks), make=arguments.split())

    add("cache above 4 GiB", (), "--seed 5 --heads 12 --batch 2 --context 3000,70 --spare-pages 103000")
    add("1M tokens", (2,), "--seed 6 --heads 12 --batch 1 --context 1048576")
    if "cuda" in backends:
        add("rows above 2^24", (), "--seed 7 --heads 12 --batch 2 --context 3000,70 --kv-format nvfp4_ds_mla --spare-pages 263000")


def arguments(row, seed):
    q = int(row["q"])
    batch = max(8, 2 * q)
    return (f"--seed {seed} --heads {row['heads']} --kv-format {row['kv']} --index-format {row['index']} --q {q} --batch {batch} "
            f"--context {row['context']} {row['page']} {row['adversarial']} {row['rows']}").split()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--part", choices=("ci", "full", "big", "cuda", "cuda-big"), default="ci")
    ap.add_argument("--binary", default=str(ROOT / "build" / "cpu" / "cli" / "dsacore"))
    ap.add_argument("--jobs", type=int, default=1, help="cases at once")
    ap.add_argument("--gpus", type=int, default=1, help="cuda parts: the cases go to them in turn")
    ap.add_argument("--seconds", type=float, default=240, help="ci: start no further case after this long")
    a = ap.parse_args()
    started = time.monotonic()
    backends = ("cuda",) if a.part.startswith("cuda") else ("reference", "cpu")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as work:
        runner = Runner(a.binary, work, a.jobs, a.gpus)
        if a.part.endswith("big"):
            big_cases(runner, backends)
        else:
            small_cases(runner, backends)
            rows = pairwise(CUDA_OPTIONS if a.part == "cuda" else OPTIONS)
            print(f"{len(rows)} generated cases cover every pair of values", flush=True)
            for seed, row in enumerate(rows):
                make = arguments(row, seed)
                ways = ways_of(backends, int(row["heads"]))
                if a.part == "ci":  # each on one backend and one D, in turn
                    runner.finish()
                    if time.monotonic() - started > a.seconds:
                        print(f"the first {seed} of {len(rows)} generated cases; `--part full` runs all")
                        break
                    d = (1, 2, 4, 8)[seed % 4]
                    ways = [("cpu" if seed % 3 else "reference", d if int(row["heads"]) % d == 0 else 1)]
                runner.add(" ".join(make), ways, make=make)
        runner.finish()
    print(f"oracle: {runner.done - runner.failed} passed, {runner.failed} failed in {time.monotonic() - started:.0f} s")
    return 1 if runner.failed or not runner.done else 0


if __name__ == "__main__":
    sys.exit(main())
