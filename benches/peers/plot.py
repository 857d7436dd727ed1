# SPDX-License-Identifier: Apache-2.0
"""plot.py RESULT.json PLOT.svg: GB/s over block size, a panel for each way of kvferry."""
import json
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402, after the choice of the backend


def size(nbytes):
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def main(result, out):
    with open(result) as file:
        rows = json.load(file)["rows"]
    ways = list(dict.fromkeys((r["transport"], r["memory"], r["waiting"]) for r in rows))
    columns = 2
    lines = -(-len(ways) // columns)
    plt.rcParams["svg.hashsalt"] = "kvferry"  # the same result gives the same file
    figure, panels = plt.subplots(lines, columns, figsize=(11, 3.4 * lines), squeeze=False)
    for panel, way in zip(panels.flat, ways):
        mine = [r for r in rows if (r["transport"], r["memory"], r["waiting"]) == way]
        x = range(len(mine))
        panel.plot(x, [r["limit_gbps"] for r in mine], "--", color="0.5", label="bare limit")
        panel.plot(x, [r["kvferry_gbps"] for r in mine], "o-", color="C0", linewidth=2, label="kvferry")
        for i, name in enumerate(dict.fromkeys(n for r in mine for n in r["peers"])):
            panel.plot(x, [r["peers"].get(name) for r in mine], ".-", color=f"C{i + 1}", label=name)
        panel.set_xticks(list(x), [size(r["block_size"]) for r in mine])
        panel.set_ylim(bottom=0)
        panel.set_ylabel("GB/s")
        panel.set_title(f"{way[0]}, {way[1]}, {way[2]}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    for panel in list(panels.flat)[len(ways):]:
        panel.set_visible(False)
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
