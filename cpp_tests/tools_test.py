#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvferry-info and kvferry-bench as a user calls them.

    KVFERRY_TOOLS=<folder of the programs> python3 tools_test.py [-v] [Class[.test]]
"""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

TOOLS = pathlib.Path(os.environ["KVFERRY_TOOLS"])
VECTORS = pathlib.Path(__file__).parent.parent / "tests" / "vectors" / "reshard.json"


def run(tool, *args, status=0):
    """Runs a tool; its standard output."""
    done = subprocess.run([TOOLS / tool, *map(str, args)], capture_output=True, text=True, timeout=100)
    assert done.returncode == status, f"{tool} {args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if status == 0 else done.stdout + done.stderr


class Info(unittest.TestCase):
    def test_json_tells_versions_transports_and_limits(self):
        info = json.loads(run("kvferry-info", "--json"))
        self.assertRegex(info["version"], r"^\d+\.\d+\.\d+$")
        self.assertEqual(info["version"], info["header_version"])
        self.assertEqual(info["abi_version"], 1)
        paths = {path["name"]: path for path in info["transports"]}
        self.assertEqual(list(paths), ["inproc", "shm", "unix", "tcp", "ucx", "cuda_ipc"])
        for name in ["inproc", "shm", "unix", "tcp"]:
            self.assertTrue(paths[name]["available"], paths[name])
        for path in paths.values():
            self.assertTrue(path["reason"], path)
        machine = info["machine"]
        self.assertEqual(machine["sealed_memfd"], "ok")
        self.assertGreater(machine["mem_total"], machine["mem_available"])
        self.assertEqual(machine["cpus_allowed"], len(os.sched_getaffinity(0)))
        self.assertIn("memlock_limit", machine)
        self.assertIn("open_files_limit", machine)
        self.assertIsInstance(machine["reserved_huge_pages"], list)
        self.assertIn("CUDA", machine["cuda"])

    def test_text_names_every_transport(self):
        text = run("kvferry-info")
        for name in ["inproc: available", "shm: available", "unix: available", "tcp: available", "ucx:",
                     "cuda_ipc:"]:
            self.assertIn(name, text)

    def test_self_test_moves_both_kinds_of_memory(self):
        tests = json.loads(run("kvferry-info", "--self-test", "--json"))["self_test"]
        self.assertEqual([t["memory"] for t in tests], ["pool", "own"])
        for test in tests:
            self.assertTrue(test["passed"], test)
            self.assertEqual(test["transport"], "shm", test)
            # Slots 255, 252, ... 3, and 0, of 64 KiB each.
            self.assertEqual(test["bytes"], 86 * 65536, test)

    def test_peer_tells_what_is_selected_and_what_stands_against_the_others(self):
        with tempfile.TemporaryDirectory() as folder:
            metadata, key, other = (pathlib.Path(folder) / name for name in ["meta", "key", "other"])
            key.write_text("sixteen bytes or more\n")
            other.write_text("another key as long\n")
            serve = subprocess.Popen([TOOLS / "kvferry-info", "--serve", metadata, "--key-file", key],
                                     stdout=subprocess.PIPE, text=True)
            try:
                self.assertIn("serving", serve.stdout.readline())
                found = json.loads(run("kvferry-info", "--peer", metadata, "--key-file", key, "--json"))
                self.assertEqual(found["selected"], "shm", found)
                paths = {path["name"]: path for path in found["transports"]}
                for name, available in [("inproc", False), ("shm", True), ("unix", True), ("tcp", True)]:
                    self.assertEqual(paths[name]["available"], available, paths[name])
                    self.assertIn(name + ":", paths[name]["reason"])
                self.assertIn("another process", paths["inproc"]["reason"])
                text = run("kvferry-info", "--peer", metadata, "--key-file", key)
                self.assertIn("selected shm", text)
                text = run("kvferry-info", "--peer", metadata, "--key-file", other, status=1)
                self.assertIn("no transport", text)
                self.assertIn("another pre-shared key", text)
            finally:
                serve.terminate()
                self.assertEqual(serve.wait(timeout=20), 0)
                serve.stdout.close()

    def test_unknown_options_are_refused(self):
        done = subprocess.run([TOOLS / "kvferry-info", "--no-such-option"], capture_output=True)
        self.assertNotEqual(done.returncode, 0)


def kv_file(case, side):
    ranks = case[side]
    replicas = 1 + max(rank["replica"] for rank in ranks)

    def view(rank, role):
        return {"role": role, "element_bits": 16, "heads": case["kv_heads"] // rank["tp_size"],
                "bytes_per_head": 256, "shards": rank["tp_size"], "shard": rank["tp_rank"],
                "replicas": replicas, "replica": rank["replica"]}

    return {"fingerprint": case["name"], "ranks": [
        {"global_rank": rank["rank"], "groups": [
            {"kind": "paged", "tokens_per_block": 16, "window": 0, "layers": layers(rank),
             "views": [view(rank, "key"), view(rank, "value")]}]} for rank in ranks]}


def ssm_file(case, side):
    dims = case["dims"]
    inner, grouped = dims["nheads"] * dims["headdim"], dims["ngroups"] * dims["d_state"]

    def place(rank):
        return rank["tp_rank"], rank["layer_start"]

    ranks, before = [], []
    for rank in case[side]:
        tp = rank["tp_size"]
        shared = {"element_bits": 32, "shards": tp, "shard": rank["tp_rank"],
                  "replicas": sum(place(other) == place(rank) for other in case[side]),
                  "replica": before.count(place(rank))}
        before.append(place(rank))
        conv = {**shared, "role": "conv", "heads": (inner + 2 * grouped) // tp,
                "bytes_per_head": dims["d_conv"] * 4,
                "sections": [{"name": "x", "total": inner}, {"name": "B", "total": grouped},
                             {"name": "C", "total": grouped}]}
        recurrent = {**shared, "role": "recurrent", "heads": dims["nheads"] // tp,
                     "bytes_per_head": dims["headdim"] * dims["d_state"] * 4}
        ranks.append({"global_rank": rank["rank"], "groups": [
            {"kind": "state", "tokens_per_block": 0, "layers": layers(rank), "views": [conv, recurrent]}]})
    return {"fingerprint": case["name"], "ranks": ranks}


def layers(rank):
    return list(range(rank["layer_start"], rank["layer_start"] + rank["num_layers"]))


def per_layer(rows, name):
    """Merged rows, taken apart again: one for each layer."""
    return {(row["src"], row["dst"], name(row), row["layers"][0] + i, row["src_layers"][0] + i,
             row["dst_layers"][0] + i, *row["src_range"], *row["dst_range"])
            for row in rows for i in range(row["layers"][1] - row["layers"][0])}


class Plan(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.vectors = json.loads(VECTORS.read_text())

    def plan(self, source, destination, *args, status=0):
        files = []
        for name, content in [("source.json", source), ("destination.json", destination)]:
            files.append(self.folder / name)
            files[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        return run("kvferry-info", "--plan", *files, *args, status=status)

    def lowest(self, case, layout):
        text = self.plan(layout(case, "src"), layout(case, "dst"), "--policy", "lowest", "--json")
        plan = json.loads(text)
        self.assertEqual((plan["errors"], plan["uncovered"]), ([], []), case["name"])
        return plan["transfers"]

    def test_kv_vectors(self):
        self.assertEqual(len(self.vectors["kv"]), 30)
        for case in self.vectors["kv"]:
            rows = self.lowest(case, kv_file)
            wanted = [dict(row, src_range=row["src_heads"], dst_range=row["dst_heads"])
                      for row in case["transfers"]]
            for role in ["key", "value"]:
                self.assertEqual(per_layer([row for row in rows if row["role"] == role], lambda _: ""),
                                 per_layer(wanted, lambda _: ""), f"{case['name']}, {role}")

    def test_ssm_vectors(self):
        self.assertEqual(len(self.vectors["ssm"]), 24)
        for case in self.vectors["ssm"]:
            rows = self.lowest(case, ssm_file)
            wanted = [dict(row, **{name + "layers": [row[name + "layer"], row[name + "layer"] + 1]
                                   for name in ["src_", "dst_"]},
                           layers=[row["layer"], row["layer"] + 1]) for row in case["transfers"]]
            self.assertEqual(per_layer(rows, lambda row: row["section"] or row["role"]),
                             per_layer(wanted, lambda row: row["band"]), case["name"])

    def test_text_is_a_table(self):
        case = self.vectors["kv"][0]
        text = self.plan(kv_file(case, "src"), kv_file(case, "dst"))
        self.assertNotIn("{", text)
        self.assertIn("1000", text)

    def test_what_is_wrong_fails(self):
        case = self.vectors["kv"][0]
        source, destination = kv_file(case, "src"), kv_file(case, "dst")
        destination["fingerprint"] = "another model"
        plan = json.loads(self.plan(source, destination, "--json", status=1))
        self.assertIn("another model", json.dumps(plan["errors"]))
        source = kv_file(case, "src")
        source["ranks"] = [r for r in source["ranks"] if r["global_rank"] not in (1, 4)]  # layer 15
        self.plan(source, kv_file(case, "dst"), status=1)
        self.plan("not JSON", kv_file(case, "dst"), status=1)

    def test_what_is_wrong_with_a_file_is_told_with_its_name(self):
        case = self.vectors["kv"][0]
        good, empty, other = (self.folder / name for name in ["good.json", "empty.json", "other.json"])
        good.write_text(json.dumps(kv_file(case, "src")))
        empty.write_text("")
        other.write_text("not JSON")
        for bad, why in [("/nowhere/a", "does not exist"), (self.folder, "director"),
                         (empty, f"cannot read {empty}: it is empty"),
                         ("/proc/self/mem", "cannot read /proc/self/mem: Input/output error"),
                         (other, "not a layout file")]:
            for arguments in ["--plan", bad, good], ["--plan", good, bad], ["--peer", bad]:
                if bad == other and arguments[0] == "--peer":
                    why = "not kvferry metadata"
                done = subprocess.run([TOOLS / "kvferry-info", *arguments], capture_output=True, text=True,
                                      timeout=100)
                self.assertNotEqual(done.returncode, 0, arguments)
                text = done.stdout + done.stderr
                self.assertIn(str(bad), text, arguments)
                self.assertIn(why, text, arguments)
        for bad, why in [("/nowhere/a", "does not exist"), (self.folder, "director"), (empty, "0 bytes")]:
            done = subprocess.run([TOOLS / "kvferry-info", "--serve", self.folder / "meta", "--key-file", bad],
                                  capture_output=True, text=True, timeout=100)
            self.assertNotEqual(done.returncode, 0, bad)
            self.assertIn(str(bad), done.stdout + done.stderr)
            self.assertIn(why, done.stdout + done.stderr)
        done = subprocess.run([TOOLS / "kvferry-info", "--serve", "/nowhere/meta"], capture_output=True, text=True,
                              timeout=100)
        self.assertEqual((done.returncode, done.stderr),
                         (2, "kvferry-info: cannot write /nowhere/meta: No such file or directory\n"))


class Bench(unittest.TestCase):
    KEYS = {"case", "block_size", "blocks", "gbps", "limit_gbps", "ratio", "p50_us", "p99_us"}

    def lines(self, *args):
        text = run("kvferry-bench", "--json", "--quiet-s", 0, "--pool-mib", 16, *args)
        return [json.loads(line) for line in text.splitlines()]

    def one_case(self, memory):
        [result] = self.lines("--memory", memory, "--block-size", "4KiB", "--blocks", 300,
                              "--repeats", 2, "--threads", 2)
        self.assertLessEqual(self.KEYS, set(result))
        self.assertEqual((result["block_size"], result["blocks"]), (4096, 300))
        self.assertEqual((result["memory"], result["transport"]), (memory, "shm"))
        self.assertIs(result["compared"], True)
        self.assertGreater(min(result["gbps"], result["limit_gbps"], result["ratio"]), 0)
        self.assertLessEqual(result["p50_us"], result["p99_us"])
        return result

    def test_pool(self):
        self.assertIn("memcpy", self.one_case("pool")["bare_gbps"])

    def test_own(self):
        self.assertIn("process_vm_readv", self.one_case("own")["limit"])

    def test_every_transport_has_its_limit(self):
        for transport, limit in [("inproc", "memcpy"), ("unix", "unix_stream"), ("tcp", "tcp_stream")]:
            for memory, spin in [("pool", 0), ("own", 200)]:
                [result] = self.lines("--transport", transport, "--memory", memory, "--spin-us", spin, "--scattered",
                                      "--block-size", "4KiB", "--blocks", 300, "--repeats", 1, "--threads", 2)
                self.assertEqual((result["transport"], result["memory"]), (transport, memory))
                self.assertIn(limit, result["bare_gbps"])
                self.assertIs(result["compared"], True)

    def test_steps_wait_for_a_line(self):
        done = subprocess.run([TOOLS / "kvferry-bench", "--step", "--quiet-s", "0", "--pool-mib", "16", "--repeats", "2",
                               "--block-size", "4KiB", "--blocks", "10", "--transport", "tcp"],
                              input="\n\n\n", capture_output=True, text=True, timeout=100)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([line.get("repetition") for line in lines], [0, 1, 2, None], done.stderr)
        self.assertEqual(set(lines[1]["seconds"]), {"kvferry", "tcp_stream"})
        self.assertEqual(lines[3]["repeats"], 2)

    def test_odd_sizes(self):
        [result] = self.lines("--block-size", 64, "--blocks", 7, "--repeats", 1, "--threads", 1)
        self.assertIs(result["compared"], True)
        [result] = self.lines("--block-size", "16MiB", "--blocks", 1, "--repeats", 1, "--threads", 3)
        self.assertIs(result["compared"], True)

    def test_scenarios(self):
        for name, keys in {
            "status": ["transfer_poll_ns", "take_events_ns"],
            "latency": ["p50_us", "p99_us", "event_fd_p50_us", "limit_p50_us"],
            "begin": ["p50_us", "blocks", "peer_ms", "layout_ms"],
            "registration": ["first_us", "last_us", "last_over_first"],
            "idle": ["cpu_ms", "wakeups_per_s"],
        }.items():
            [result] = self.lines("--scenario", name, "--idle-s", 0.5, "--repeats", 1,
                                  "--rounds", 100, "--regions", 300)
            self.assertEqual(result["case"], name)
            for key in keys:
                self.assertIn(key, result, name)

    def test_too_many_blocks_is_an_error(self):
        text = run("kvferry-bench", "--quiet-s", 0, "--pool-mib", 1, "--block-size", "64KiB",
                   "--blocks", 17, status=1)
        self.assertIn("--pool-mib", text)

    def test_a_number_that_no_integer_holds_is_an_error(self):
        text = run("kvferry-bench", "--block-size", 2**64, status=105)
        self.assertIn("out of range", text)


class Scale(unittest.TestCase):
    """Batches of any size in one call, with default settings, over every transport."""

    def test_many_blocks_of_4_kib(self):
        for transport in ["inproc", "shm", "unix", "tcp"]:
            for blocks in [4096, 100_000]:
                text = run("kvferry-bench", "--json", "--quiet-s", 0, "--transport", transport, "--pool-mib", 400,
                           "--block-size", "4KiB", "--blocks", blocks, "--repeats", 1)
                result = json.loads(text)
                self.assertEqual((result["transport"], result["blocks"]), (transport, blocks))
                self.assertIs(result["compared"], True)


if __name__ == "__main__":
    unittest.main()
