#!/usr/bin/env python3
"""Times dsacore's layer and its stages over all shapes, puts the public chains' times of the same run beside them, writes h200.json and h200.md.

Called by compare.sh. A peer's time is the fastest public chain's: for the layer over the FP8 cache (`pipe`) and over a BF16 cache
(`pipe_bf16_cache`), each at its best arrangement; for a stage each of the chains of `stages`, one line each.
"""
import argparse
import json
import pathlib
import subprocess
import time

# heads, batch, context, and how many times faster the layer has to be at least.
BARS = [(12, 1, 8192, 2.6), (12, 1, 131072, 2.7), (12, 8, 8192, 2.0), (12, 8, 32768, 1.95), (12, 8, 131072, 1.55), (12, 64, 8192, 1.6),
        (12, 64, 131072, 1.14), (96, 1, 8192, 2.0), (96, 8, 32768, 1.75), (96, 64, 8192, 1.4), (96, 64, 131072, 1.12)]
MODES = "serial wait fork front late late_front".split()
GRID = "--heads 12,96 --batch 1,8,32,64 --context 8192,32768,131072"
# Key of the result -> the `dsacore bench` commands that measure it, the most important first. Those of the bars are judged by the cpu backend.
RUNS = {
    "grid": [GRID + " --verify", GRID + " --kv-format fp8,nvfp4_ds_mla"],
    "rotation": ["--heads 12 --batch 1 --context 8192 --layers 8", "--heads 12 --batch 1 --context 8192 --layers 16"],
    "formats": ["--heads 12,96 --batch 64 --context 8192,131072 --index-format mxfp4"],
    "queries": [f"--heads 12 --batch {q},{16 * q} --q {q} --context 131072" for q in (1, 2, 4, 8)],
    "modes": ["--heads 12,96 --batch 1,8,64 --context 8192,32768,131072 " + " ".join(f"--overlap {mode}" for mode in MODES)],
    "heads": ["--heads 6,24,48 --batch 1,8,64 --context 8192,131072"],
    "long": ["--heads 12 --batch 1 --context 8192,32768,131072,524288,1048576"],
}


class Dsacore:
    """Runs `dsacore bench` while there is time."""

    def __init__(self, program, seconds):
        self.program, self.end = program, time.monotonic() + seconds
        self.head, self.problems = {}, []

    def points(self, words):
        """What a command measured; empty where it failed or there was no time for it, which is then among the problems."""
        left = self.end - time.monotonic()
        if left < 5:
            self.problems.append(f"{words}: no time left")
            return []
        start = time.monotonic()
        command = [self.program, "bench", "--backend", "cuda", "--json", *words.split()]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{words}: no time left")
            return []
        if result.returncode != 0:
            self.problems.append(f"{words}: {result.stderr.strip() or 'the backends disagree'}")
        if not result.stdout:
            return []
        measured = json.loads(result.stdout)
        self.head = {key: value for key, value in measured.items() if key != "points"}
        print(f"{time.monotonic() - start:5.0f} s  {words}", flush=True)
        return measured["points"]


def microseconds(timed):
    return round(timed["seconds"]["median"] * 1e6, 3)


def record(point):
    """A point in the units of the tables."""
    keys = ("heads", "batch", "q", "context", "kv_format", "index_format", "overlap", "layers", "choices", "agrees")
    out = {key: point[key] for key in keys if key in point}
    out.update(dsacore_us=microseconds(point["layer"]), floor_us=round(point["layer"]["floor_seconds"] * 1e6, 3))
    out["stages"] = {stage["name"]: {"dsacore_us": microseconds(stage), "floor_us": round(stage["floor_seconds"] * 1e6, 3)}
                     for stage in point["stages"] + point["chains"]}
    return out


def shape_of(row):
    return row["heads"], row["batch"], row["context"]


def rows_of(peers, section, shape):
    return [row for row in peers.get(section, []) if (row["H"], row["batch"], row["context"]) == shape]


def layer_peer(peers, shape):
    """(us, which) of the faster public chain, or Nones."""
    times = [(row["best_us"], f"{name}, {row['best']}") for section, name in (("pipe", "FP8 cache"), ("pipe_bf16_cache", "BF16 cache"))
             for row in rows_of(peers, section, shape) if "best_us" in row]
    return min(times, default=(None, None))


def stage_peers(peers, shape):
    """Lines (stage, which, us) of the public kernels of single stages: of the selects the fastest, of the attentions each."""
    lines = []
    for row in rows_of(peers, "stages", shape):
        lines += [(stage, which, us) for stage in ("sparse_core", "sparse_core+value") for which, us in row[stage].items()]
        if row["indexer"]:
            us, which = min((us, which) for which, us in row["indexer"].items())
            lines.append(("indexer", which, us))
    return lines


def plain(grid):
    """The records of the default formats."""
    return [row for row in grid if (row["kv_format"], row["index_format"]) == ("fp8_ds_mla", "fp8")]


def layers_and_stages(grid, peers):
    at = {shape_of(row): row for row in plain(grid)}
    layers, stages = [], []
    for *shape, bar in BARS:
        row = at.get(tuple(shape))
        if row is None:
            continue
        key = dict(zip(("heads", "batch", "context"), shape))
        us, which = layer_peer(peers, tuple(shape))
        layers.append(dict(key, dsacore_us=row["dsacore_us"], peer_us=us, peer=which, floor_us=row["floor_us"], bar=bar, layers=row["layers"],
                           agrees=row.get("agrees")))
        stages += [dict(key, stage=stage, dsacore_us=row["stages"][stage]["dsacore_us"], peer_us=us, peer=which,
                        floor_us=row["stages"][stage]["floor_us"]) for stage, which, us in stage_peers(peers, tuple(shape))]
    return layers, stages


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)] + ["| " + " | ".join(map(str, row)) + " |" for row in rows] + [""]


def times_text(row):
    return f"{row['peer_us'] / row['dsacore_us']:.2f}" if row["peer_us"] else "-"


def peer_text(row):
    return f"{row['peer_us']:.1f}" if row["peer_us"] else "-"


def bars_text(layers):
    return ["Layers against the faster public chain:", ""] + table(
        ["H", "B", "context", "dsacore", "public chain", "which", "x", "bar", "floor", "share of floor", "agrees"],
        [[*shape_of(row), f"{row['dsacore_us']:.1f}", peer_text(row), row["peer"] or "-", times_text(row), row["bar"], f"{row['floor_us']:.1f}",
          f"{row['floor_us'] / row['dsacore_us']:.0%}", {True: "yes", False: "NO"}.get(row["agrees"], "-")] for row in layers])


def stages_text(stages):
    return ["Stages alone, each chain in one graph:", ""] + table(
        ["H", "B", "context", "stage", "dsacore", "public kernels", "which", "x", "floor"],
        [[*shape_of(row), row["stage"], f"{row['dsacore_us']:.1f}", peer_text(row), row["peer"], times_text(row), f"{row['floor_us']:.1f}"] for row in stages])


def points_text(title, rows):
    """Layer and stages with their floors: time (share of the floor)."""
    if not rows:
        return []
    names = [name for name in rows[0]["stages"] if "+" not in name]
    with_share = lambda timed: f"{timed['dsacore_us']:.1f} ({timed['floor_us'] / timed['dsacore_us']:.0%})"  # noqa: E731
    return [title, ""] + table(
        ["H", "B", "q", "context", "cache", "keys", "mode", "layer", *names],
        [[row["heads"], row["batch"], row["q"], row["context"], row["kv_format"], row["index_format"], row["overlap"], with_share(row),
          *(with_share(row["stages"][name]) if name in row["stages"] else "-" for name in names)] for row in rows])


def modes_text(rows):
    """A line a shape, a column a mode; a mode that fell back to another is not shown twice."""
    shapes = {}
    for row in rows:
        shapes.setdefault(shape_of(row), {})[row["overlap"]] = row["dsacore_us"]
    return ["Overlap modes, microseconds a layer:", ""] + table(
        ["H", "B", "context", *MODES], [[*shape, *(f"{times[mode]:.1f}" if mode in times else "-" for mode in MODES)] for shape, times in shapes.items()])


def json_text(result):
    """A line a record."""
    values = {key: "[\n" + ",\n".join(map(json.dumps, value)) + "]" if isinstance(value, list) else json.dumps(value, indent=1) for key, value in result.items()}
    return "{\n" + ",\n".join(f'"{key}": {value}' for key, value in values.items()) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsacore", required=True)
    parser.add_argument("--peers", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--runs", default=" ".join(RUNS), help="which of " + " ".join(RUNS))
    parser.add_argument("--seconds", type=float, default=400, help="that dsacore's part may take")
    args = parser.parse_args()
    if unknown := set(args.runs.split()) - RUNS.keys():
        parser.error("--runs: there is no " + " ".join(sorted(unknown)))
    peers = json.loads(args.peers.read_text())
    dsacore = Dsacore(args.dsacore, args.seconds)
    result = {key: [record(point) for words in RUNS[key] for point in dsacore.points(words)] for key in RUNS if key in args.runs.split()}
    grid = result.get("grid", [])
    layers, stages = layers_and_stages(grid, peers)
    result["formats"] = [row for row in grid if row["batch"] == 64 and row["context"] in (8192, 131072)] + result.get("formats", [])
    meta = dict(dsacore.head, date=peers["meta"].get("date"), gpu=peers["meta"].get("smi"), peers=peers["meta"], problems=dsacore.problems)
    args.out.joinpath("h200.json").write_text(json_text({"layers": layers, "stages": stages, **result, "meta": meta}))
    lines = [f"dsacore {meta.get('version')} ({meta.get('commit')}), {meta.get('device')}, {meta['date']}: microseconds a layer.", ""]
    lines += bars_text(layers) + stages_text(stages) + modes_text(result.get("modes", []))
    for key, title in (("formats", "Formats at 64 requests:"), ("queries", "Rows a request:"), ("rotation", "8 and 16 layers:"), ("heads", "Other heads:"),
                       ("long", "Context:"), ("grid", "All shapes; in brackets the floor's share:")):
        lines += points_text(title, result.get(key, []))
    lines += [f"Not measured or wrong: {problem}" for problem in dsacore.problems]
    args.out.joinpath("h200.md").write_text("\n".join(lines) + "\n")
    print("\n".join(bars_text(layers) + [f"Not measured or wrong: {problem}" for problem in dsacore.problems]))
    return 1 if dsacore.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
