#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A peer that moves nothing, for the harness' own test: it needs nothing but Python. `--wrong` fails
its comparison, `--silent` never answers, `--slow` burns a CPU while others have their turn."""
import json
import os
import sys
import threading
import time


def answer(message):
    print(json.dumps(message), flush=True)


def busy():
    while True:
        pass


if "--silent" in sys.argv:
    time.sleep(3600)
if "--slow" in sys.argv:
    threading.Thread(target=busy, daemon=True).start()
answer({"ready": True, "pids": [os.getpid()], "setup": {}})
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "end":
        break
    if request["do"] == "move" and request["compared"] and "--wrong" in sys.argv:
        answer({"error": "AssertionError: block 3 is not the source's block 5"})
    elif request["do"] == "move":
        answer({"seconds": 1.0})
    elif request["do"] == "latency":
        answer({"waiting": "spinning", "p50_us": 1000.0, "p99_us": 2000.0})
    elif request["do"] == "case":
        answer({"prepare_ms": 1.0})
    else:
        answer({"error": f"no {request['do']}"})
os._exit(0)
