# SPDX-License-Identifier: Apache-2.0
"""The result as a page."""
import os
import platform


def machine():
    """What the figures depend on."""
    facts = {"kernel": platform.release(), "cpus": len(os.sched_getaffinity(0)), "libc": "-".join(platform.libc_ver())}
    with open("/proc/cpuinfo") as file:
        facts["cpu"] = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "?")
    with open("/proc/meminfo") as file:
        facts["memory_gib"] = round(int(file.readline().split()[1]) / 2**20, 1)
    for name in ("enabled", "shmem_enabled"):
        try:
            with open(f"/sys/kernel/mm/transparent_hugepage/{name}") as file:
                facts[f"huge_pages_{name}"] = file.read().split("[")[1].split("]")[0]
        except OSError:
            pass
    return facts


def number(value):
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(number(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def text(data, svg):
    """The Markdown page of a result; `svg`: name of the plot beside it, or None."""
    rows, facts = data["rows"], data["machine"]
    out = [f"# kvferry beside its peers, {data['date']}\n"]
    out.append(f"`benches/peers/run`, kvferry {data['kvferry']}. {facts['cpus']} CPUs of {facts['cpu']}, "
               f"{facts['memory_gib']} GiB, Linux {facts['kernel']}, {facts['libc']}; huge pages "
               f"{facts.get('huge_pages_enabled', '?')}, for shared memory {facts.get('huge_pages_shmem_enabled', '?')}. "
               f"Load average {data['load_before']:.1f} before, {data['load_after']:.1f} after. "
               "Absolute figures move between machines and days; the ratio is what can be compared.\n")
    noisy = sum(row["noisy"] for row in rows)
    all_repeats = sum(row["repeats"] for row in rows)
    out.append(f"All took turns in one session, in random order, {data['repeats']} counted repetitions of each case, "
               f"medians; random blocks on both sides, {data['pool_mib']} MiB each; the first repetition of everybody "
               f"compared byte for byte. {noisy} of {all_repeats} repetitions of kvferry began while other programs "
               "kept the machine busy. A peer is stopped while others have their turn.\n")
    for name, why in data["missing"].items():
        out.append(f"**NOT MEASURED: {name}**: {' '.join(why.split())[:300]}\n")
    if svg:
        out.append(f"![GB/s over block size]({svg})\n")
    out.append("## Six cases\n\nGB/s = 10^9 bytes/s. ratio: median of limit time / kvferry time.\n")
    groups = dict.fromkeys((r["transport"], r["memory"], r["waiting"], r["threads"]) for r in rows)
    for transport, memory, waiting, threads in groups:
        mine = [r for r in rows if (r["transport"], r["memory"], r["waiting"]) == (transport, memory, waiting)]
        names = list(dict.fromkeys(name for r in mine for name in r["peers"]))
        kind = {"pool": "pools of kvferry", "own": "the engine's own memory"}[memory]
        out.append(f"**{transport}**, {kind}, {waiting}, {threads} copying thread(s); limit: "
                   f"{', '.join(dict.fromkeys(r['limit'] for r in mine))}\n")
        out.append(table(["blocks", "kvferry", "limit", "ratio", *names],
                         [[r["case"], r["kvferry_gbps"], r["limit_gbps"], r["ratio"],
                           *(r["peers"].get(name) for name in names)] for r in mine]))
    out.append("## One block of 4 KiB\n\nus, from asking to being there, p50 / p99. kvferry: `kvf_pull_begin()` until "
               "`kvf_transfer_poll()` says so, until `kvf_transfer_wait()` returns, until the event was taken after a "
               "wait on the event fd.\n")
    def pair(r):
        return f"{number(r['p50_us'])} / {number(r['p99_us'])}"
    out.append(table(["way", "waiting", "kvferry, polled", "waited", "event fd", "limit", "peers (they spin)"],
                     [[f"{r['transport']}, {r['memory']}", r["waiting"], pair(r), r["wait_p50_us"], r["event_fd_p50_us"],
                       f"{number(r['limit_p50_us'])} / {number(r['limit_p99_us'])} ({r['limit']})",
                       ", ".join(f"{name} {pair(p)}" for name, p in r["peers"].items())] for r in data["latency"]]))
    out.append("## Preparation\n\n`peer`: knowing and reaching the other side; kvferry maps and populates its pools "
               "here. `lists`: everything that names all blocks. `request`: one for as many blocks, before the first "
               "byte.\n")
    out.append(table(["who", "peer, ms", "lists, ms", "blocks", "request, us"],
                     [[r["who"], r.get("peer_ms"), r.get("prepare_ms"), r["blocks"], r.get("request_us")]
                      for r in data["preparation"]]))
    out.append("## Status call\n")
    out.append(table(["who", "call", "ns"], [[r["who"], r["call"], r["ns"]] for r in data["status"]]))
    out.append("## Registration\n\nPages of 4 KiB, a gap between two; the first and the last hundred.\n")
    out.append(table(["who", "regions", "first, us", "last, us", "last / first", "all, ms"],
                     [[r["who"], r["regions"], r["first_us"], r["last_us"], r["last_over_first"], r["all_ms"]]
                      for r in data["registration"]]))
    out.append("## Idle\n\nBoth processes together.\n")
    out.append(table(["who", "CPU, ms per s", "wake-ups per s"],
                     [[r["who"], r["cpu_ms_per_s"], r.get("wakeups_per_s")] for r in data["idle"]]))
    out.append("## Settings\n")
    out.append(table(["peer", "what", "environment", "arguments", "pinned"],
                     [[name, s["what"], " ".join(f"`{k}={v}`" for k, v in s["environment"].items()),
                       " ".join(s["arguments"]), "yes" if s["pinned"] else "no"]
                      for name, s in data["settings"].items()]))
    for name, packages in data["packages"].items():
        out.append(f"{name}: {', '.join(f'`{p}`' for p in packages)}\n")
    return "\n".join(out)
