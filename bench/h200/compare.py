#!/usr/bin/env python3
"""Times dsacore's layer at each shape, puts the public chains' times of the same run beside it, writes h200.json and h200.md.

Called by compare.sh. A peer's time is the faster of two public chains, each at its best arrangement: over the FP8 cache (`pipe`) and
over a BF16 cache (`pipe_bf16_cache`).
"""
import argparse
import json
import pathlib
import subprocess
import time

# heads, batch, context, and how many times faster the layer has to be at least.
BARS = [(12, 1, 8192, 2.6), (12, 1, 131072, 2.7), (12, 8, 8192, 2.0), (12, 8, 32768, 1.95), (12, 8, 131072, 1.55), (12, 64, 8192, 1.6),
        (12, 64, 131072, 1.14), (96, 1, 8192, 2.0), (96, 8, 32768, 1.75), (96, 64, 8192, 1.4), (96, 64, 131072, 1.12)]


def dsacore_point(program, heads, batch, context):
    """What `dsacore bench --json` measured at a shape."""
    command = [program, "bench", "--backend", "cuda", "--heads", heads, "--batch", batch, "--context", context, "--json"]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr.strip())
    return json.loads(result.stdout)


def peer_time(peers, heads, batch, context):
    """(us, which) of the faster public chain, or None where the run has none."""
    times = []
    for section, name in (("pipe", "FP8 cache"), ("pipe_bf16_cache", "BF16 cache")):
        for row in peers.get(section, []):
            if (row["H"], row["batch"], row["context"]) == (heads, batch, context) and "best_us" in row:
                times.append((row["best_us"], f"{name}, {row['best']}"))
    return min(times) if times else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsacore", required=True)
    parser.add_argument("--peers", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--shapes", default="", help="heads/batch/context, with blanks between; default: all of BARS")
    args = parser.parse_args()
    bars = {shape[:3]: shape[3] for shape in BARS}
    shapes = [tuple(map(int, text.split("/"))) for text in args.shapes.split()] or list(bars)
    peers = json.loads(args.peers.read_text())
    layers, stages, problems, version = [], [], [], {}
    for heads, batch, context in shapes:
        start = time.monotonic()
        try:
            measured = dsacore_point(args.dsacore, heads, batch, context)
        except RuntimeError as error:
            problems.append(f"{heads}/{batch}/{context}: {error}")
            continue
        version = {key: measured[key] for key in ("version", "commit")}
        point = measured["points"][0]
        key = {"heads": heads, "batch": batch, "context": context}
        peer = peer_time(peers, heads, batch, context)
        layer = dict(key, dsacore_us=point["layer"]["seconds"]["median"] * 1e6, peer_us=peer and peer[0], peer=peer and peer[1],
                     floor_us=point["layer"]["floor_seconds"] * 1e6, layers=measured["layers"])
        layers.append(layer)
        stages += [dict(key, stage=stage["name"], dsacore_us=stage["seconds"]["median"] * 1e6, floor_us=stage["floor_seconds"] * 1e6)
                   for stage in point["stages"]]
        print(f"{heads}/{batch}/{context}: {layer['dsacore_us']:.1f} us, peer {peer}, {time.monotonic() - start:.0f} s", flush=True)
    meta = dict(version, gpu=peers["meta"].get("smi"), date=peers["meta"].get("date"), peers=peers["meta"], problems=problems)
    args.out.joinpath("h200.json").write_text(json.dumps({"layers": layers, "stages": stages, "meta": meta}, indent=1) + "\n")
    lines = [f"dsacore {version.get('version')} ({version.get('commit')}) on {meta['gpu']}, {meta['date']}: microseconds a layer.", "",
             "| H | B | context | dsacore | public chain | which | x | bar | floor | share of floor |", "| --- " * 10 + "|"]
    for row in layers:
        times = row["peer_us"] / row["dsacore_us"] if row["peer_us"] else None
        bar = bars.get((row["heads"], row["batch"], row["context"]))
        lines.append(f"| {row['heads']} | {row['batch']} | {row['context']} | {row['dsacore_us']:.1f} | "
                     f"{row['peer_us'] or 0:.1f} | {row['peer'] or '-'} | {f'{times:.2f}' if times else '-'} | {bar or '-'} | {row['floor_us']:.1f} | "
                     f"{row['floor_us'] / row['dsacore_us']:.0%} |")
    lines += [""] + [f"Not measured: {problem}" for problem in problems]
    args.out.joinpath("h200.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
