"""Every golden reshard plan, through `kvferry-info --plan SRC DST --policy lowest --json`.

usage: check_vectors.py KVFERRY_INFO VECTORS.json
Prints how many cases and rows were compared; exits non-zero with the first difference.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

info, vectors = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())


def layers(rank):
    return list(range(rank["layer_start"], rank["layer_start"] + rank["num_layers"]))


def kv_file(case, ranks):
    def view(role, rank):
        same = [r for r in ranks if (r["tp_rank"], r["pp_rank"]) == (rank["tp_rank"], rank["pp_rank"])]
        return {
            "role": role, "element_bits": 16, "heads": case["kv_heads"] // rank["tp_size"],
            "bytes_per_head": 32, "shards": rank["tp_size"], "shard": rank["tp_rank"],
            "replicas": len(same), "replica": rank.get("replica", 0), "sections": [],
        }
    return {"fingerprint": "golden", "ranks": [
        {"global_rank": r["rank"], "groups": [{
            "kind": "paged", "tokens_per_block": 16, "window": 0, "layers": layers(r),
            "views": [view("key", r), view("value", r)]}]}
        for r in ranks]}


def ssm_file(case, ranks):
    d = case["dims"]
    x, bc = d["nheads"] * d["headdim"], d["ngroups"] * d["d_state"]
    sections = [{"name": "x", "total": x}, {"name": "B", "total": bc}, {"name": "C", "total": bc}]

    def views(rank):
        tp = rank["tp_size"]
        same = [r for r in ranks if (r["tp_rank"], r["layer_start"]) == (rank["tp_rank"], rank["layer_start"])]
        common = {"element_bits": 32, "shards": tp, "shard": rank["tp_rank"],
                  "replicas": len(same), "replica": same.index(rank)}
        return [
            {"role": "conv", "heads": (x + 2 * bc) // tp, "bytes_per_head": 4 * d["d_conv"],
             "sections": sections, **common},
            {"role": "recurrent", "heads": d["nheads"] // tp,
             "bytes_per_head": 4 * d["headdim"] * d["d_state"], "sections": [], **common},
        ]
    return {"fingerprint": "golden", "ranks": [
        {"global_rank": r["rank"], "groups": [{
            "kind": "state", "tokens_per_block": 0, "window": 0, "layers": layers(r),
            "views": views(r)}]}
        for r in ranks]}


def plan(source, destination, folder):
    for name, content in (("src", source), ("dst", destination)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    out = subprocess.run(
        [info, "--plan", folder / "src.json", folder / "dst.json", "--policy", "lowest", "--json"],
        capture_output=True, text=True, check=False)
    if out.returncode != 0:
        sys.exit(f"kvferry-info failed: {out.stdout}{out.stderr}")
    result = json.loads(out.stdout)
    assert result["uncovered"] == [] and result["errors"] == [], result
    return result["transfers"]


def rows(transfers, name):
    """One row per layer: merged layers are split."""
    all_rows = set()
    for t in transfers:
        for i in range(t["layers"][1] - t["layers"][0]):
            all_rows.add((t["src"], t["dst"], name(t), t["layers"][0] + i, t["src_layers"][0] + i,
                          t["dst_layers"][0] + i, tuple(t["src_range"]), tuple(t["dst_range"])))
    return all_rows


def compare(case, ours, golden):
    if ours != golden:
        sys.exit(f"{case['name']}: only ours {sorted(ours - golden)[:3]}, "
                 f"only golden {sorted(golden - ours)[:3]}")
    return len(golden)


compared = 0
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    for case in vectors["kv"]:
        got = plan(kv_file(case, case["src"]), kv_file(case, case["dst"]), folder)
        golden = set()
        for role in ("key", "value"):
            for t in case["transfers"]:
                row = {**t, "src_range": t["src_heads"], "dst_range": t["dst_heads"]}
                golden |= rows([row], lambda _, role=role: role)
        compared += compare(case, rows(got, lambda t: t["role"]), golden)
    for case in vectors["ssm"]:
        got = plan(ssm_file(case, case["src"]), ssm_file(case, case["dst"]), folder)
        golden = {(t["src"], t["dst"], t["band"], t["layer"], t["src_layer"], t["dst_layer"],
                   tuple(t["src_range"]), tuple(t["dst_range"])) for t in case["transfers"]}
        compared += compare(case, rows(got, lambda t: t["section"] or t["role"]), golden)
cases = len(vectors["kv"]) + len(vectors["ssm"])
print(f"{cases} golden cases, {compared} rows equal")
