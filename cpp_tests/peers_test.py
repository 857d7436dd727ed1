#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""benches/peers/run with a peer that moves nothing: what the harness does with good, wrong and silent
ones. No figure is looked at.

    KVFERRY_TOOLS=<folder of the programs> python3 peers_test.py [-v]
"""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

BENCH = pathlib.Path(os.environ["KVFERRY_TOOLS"]) / "kvferry-bench"
RUN = pathlib.Path(__file__).parent.parent / "benches" / "peers" / "run"


class Peers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name) / "out"

    def run_it(self, *args):
        command = [RUN, "--quick", "--json", "--bench", BENCH, "--repeats", 1, "--out", self.out, *args]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=560)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout), done.stderr

    def check_rows(self, data, peers):
        ways = {(r["transport"], r["memory"], r["waiting"]) for r in data["rows"]}
        self.assertEqual({way for way in ways if way[0] != "ucx"}, {("shm", "pool", "blocking"), ("shm", "own", "blocking"), ("unix", "pool", "blocking"),
                                ("unix", "pool", "spinning"), ("tcp", "pool", "blocking"),
                                ("tcp", "pool", "spinning")})
        self.assertEqual({r["case"] for r in data["rows"]}, {"4 KiB x 512", "64 KiB x 64"})
        for r in data["rows"]:
            self.assertGreater(min(r["kvferry_gbps"], r["limit_gbps"], r["ratio"]), 0, r)
            if r["transport"] != "ucx":  # not everywhere
                self.assertEqual(set(r["peers"]), set(peers.get(r["transport"], [])), r)

    def test_all_take_their_turn(self):
        data, _ = self.run_it("--peers", "fake", "--fake-arguments=--slow")
        self.check_rows(data, {"shm": ["nixl", "nixl_tuned"], "tcp": ["nixl", "mooncake", "mooncake_tuned"]})
        [row] = [r for r in data["rows"] if r["transport"] == "tcp" and r["waiting"] == "blocking"
                 and r["case"] == "4 KiB x 512"]
        self.assertEqual(row["peers"]["mooncake"], 4096 * 512 / 1e9)  # the fake takes a second
        self.assertLessEqual(set(data["missing"]), {"kvferry over ucx"})
        self.assertEqual(json.loads((self.out / "peers.json").read_text()), data)
        for part in ["latency", "preparation", "status", "registration", "idle", "settings", "machine"]:
            self.assertTrue(data[part], part)
        [page] = self.out.glob("peers-*.md")
        self.assertIn("| 4 KiB x 512 |", page.read_text())

    def test_a_wrong_peer_is_named_and_left_out(self):
        data, said = self.run_it("--peers", "fake", "--fake-arguments=--wrong", "--parts", "transfers")
        self.check_rows(data, {})
        self.assertIn("PEER NOT MEASURED: nixl: ", said)
        self.assertIn("block 3 is not the source's block 5", data["missing"]["mooncake"])

    def test_a_silent_peer_does_not_hold_up_the_rest(self):
        data, said = self.run_it("--peers", "fake", "--fake-arguments=--silent", "--deadline", 4,
                                "--parts", "transfers")
        self.check_rows(data, {})
        self.assertIn("no answer within 4 s", data["missing"]["nixl_tuned"])


if __name__ == "__main__":
    unittest.main()
