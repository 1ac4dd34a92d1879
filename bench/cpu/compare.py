#!/usr/bin/env python3
"""The rounds of bench/cpu/compare.sh: peer and dsacore in turn, medians of medians, ratios against the bars."""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "bench" / "results"
# heads, batch, context -> the peer's figure on the machine that the bars were set on (ms), bar, aim
SHAPES = {(12, 1, 8192): (2.2, 3, 4), (12, 1, 32768): (3.4, 3, 4.5), (12, 1, 131072): (8.6, 3, 5), (12, 8, 8192): (24, 8, 12),
          (12, 8, 32768): (48, 8, 12), (96, 1, 32768): (5.4, 1.8, 2.5)}
DISTURBED = 1.15


# Both get their tensors in huge pages: dsacore's generator asks for them, torch does where this is set.
ENVIRONMENT = dict(os.environ, THP_MEM_ALLOC_ENABLE="1")


def output_of(*command):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout


def bench(dsacore, heads, batch, context, *extra):
    """One `dsacore bench` of a shape: its JSON record of the one context."""
    text = output_of(dsacore, "bench", "--threads", 2, "--heads", heads, "--batch", batch, "--context", context, "--json", *extra)
    return json.loads(text)["points"][0]


def layer_ms(record):
    return record["layer"]["seconds"]["median"] * 1e3


def stages_ms(record):
    return {stage["name"]: stage["seconds"]["median"] * 1e3 for stage in record["stages"]}


def peak_kib(*command):
    """VmHWM of a command, from the kernel's accounting of the finished child."""
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout = process.stdout.read()
    process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{command}: exit status {status}")
    return usage.ru_maxrss, stdout.decode()


def memory(dsacore):
    """VmHWM of `run` without a dump, less that of --version, against the files and what was reserved."""
    base, _ = peak_kib(dsacore, "--version")
    out = []
    for heads, batch, context in ((96, 1, 32768), (12, 8, 32768)):
        with tempfile.TemporaryDirectory() as folder:
            output_of(dsacore, "generate", "--out", folder, "--heads", heads, "--batch", batch, "--context", context)
            files = [f"{folder}/layer.safetensors", f"{folder}/step.safetensors"]
            used, text = peak_kib(dsacore, "run", "--layer", files[0], "--step", files[1], "--out", f"{folder}/out.safetensors",
                                  "--threads", 2, "--json")
            allowed = sum(os.path.getsize(f) for f in files) + json.loads(text)["reserved_bytes"]
            out.append({"heads": heads, "batch": batch, "context": context, "used_bytes": (used - base) * 1024,
                        "files_and_reserved_bytes": allowed, "ratio": round((used - base) * 1024 / allowed, 3), "bar": 1.1})
    return out


def machine():
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "date": time.strftime("%Y-%m-%d")}


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--dsacore", required=True)
    ap.add_argument("--python", default=sys.executable)
    a = ap.parse_args()
    ours, peers, stages = {s: [] for s in SHAPES}, {s: [] for s in SHAPES}, {}
    for number in range(a.rounds):
        print(f"round {number + 1} of {a.rounds}", flush=True)
        for r in json.loads(output_of(a.python, ROOT / "bench" / "cpu" / "torch_cpu_layer.py", "--threads", 2, "--json")):
            peers[r["heads"], r["batch"], r["context"]].append(r["ms"])
        for shape in SHAPES:
            record = bench(a.dsacore, *shape)
            ours[shape].append(layer_ms(record))
            stages[shape] = {name: round(ms, 4) for name, ms in stages_ms(record).items()}
    rotating = {s: layer_ms(bench(a.dsacore, *s, "--layers", 4)) for s in SHAPES}
    growth = {c: bench(a.dsacore, 12, 1, c) for c in (32768, 131072, 1048576)}

    table, detail, missed = [], [], 0
    print(f"{'heads':>5} {'batch':>5} {'context':>7} {'peer ms':>8} {'dsacore ms':>10} {'x':>6} {'bar':>5} {'aim':>5} {'rotating ms':>11}")
    for shape, (figure, bar, aim) in SHAPES.items():
        peer, mine = min(peers[shape]), statistics.median(ours[shape])
        named = dict(zip(("heads", "batch", "context"), shape))
        table.append({**named, "dsacore_ms": round(mine, 4), "peer_ms": round(peer, 4)})
        disturbed = peer > DISTURBED * figure
        detail.append({**named, "dsacore_ms": ours[shape], "peer_ms": peers[shape], "times_faster": round(peer / mine, 2), "bar": bar, "aim": aim,
                       "rotating_ms": rotating[shape], "peer_above_its_figure": disturbed, "stages_ms": stages[shape]})
        missed += peer / mine < bar
        print(f"{shape[0]:>5} {shape[1]:>5} {shape[2]:>7} {peer:>8.3f} {mine:>10.3f} {peer / mine:>6.2f} {bar:>5} {aim:>5} {rotating[shape]:>11.3f}"
              + ("  MISSED" if peer / mine < bar else "") + (f"  (peer slower than {DISTURBED} x {figure} ms)" if disturbed else ""))
    indexer = {c: stages_ms(r)["indexer"] for c, r in growth.items()}
    for low, high, bar in ((32768, 131072, 4.2), (131072, 1048576, 8.5)):
        ratio = indexer[high] / indexer[low]
        missed += ratio > bar
        print(f"score and select: {high} takes {ratio:.2f} times {low} (at most {bar})" + ("  MISSED" if ratio > bar else ""))
    used = memory(a.dsacore)
    for m in used:
        missed += m["ratio"] > m["bar"]
        print(f"memory at H={m['heads']}, B={m['batch']}, {m['context']}: {m['ratio']} of files and reserved bytes (at most {m['bar']})")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "cpu.json").write_text(json.dumps(table, indent=1) + "\n")
    (RESULTS / "cpu-detail.json").write_text(json.dumps({
        "machine": machine(), "version": output_of(a.dsacore, "--version").splitlines(), "rounds": a.rounds, "shapes": detail,
        "growth": {"indexer_ms": indexer}, "memory": used}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
