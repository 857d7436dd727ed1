"""Runs the matrix on a library that submits empty pulls on purpose: exactly the full hits fail.

empty_pull_mutant.py MATRIX_TEST LIBRARY_DIR
"""

import json
import os
import subprocess
import sys
import tempfile

test, library = sys.argv[1:]
with tempfile.NamedTemporaryFile(suffix=".json") as report:
    env = dict(os.environ, LD_LIBRARY_PATH=library, KVF_FAULT="submit_empty:on")
    run = subprocess.run([test, f"--gtest_output=json:{report.name}"], env=env, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
    result = json.load(open(report.name))

cases = [case for suite in result["testsuites"] for case in suite["testsuite"]]
failed = {case["name"].split("/")[-1] for case in cases if case.get("failures")}
expected = {
    f"{way}_FullHit_{state}_{shape}"
    for way in ("Pull", "Push")
    for state in ("NoState", "State")
    for shape in ("Flat", "PerStage")
}
if len(cases) != 24 or failed != expected:
    print(run.stdout[-20000:])
    print(f"{len(cases)} cases; failed: {sorted(failed)}\nexpected to fail: {sorted(expected)}")
    sys.exit(1)
for case in cases:
    for failure in case.get("failures", []):
        if "submitted" not in failure["failure"] and "parts[0].state" not in failure["failure"]:
            print(case["name"], "failed for another reason:", failure["failure"])
            sys.exit(1)
print("exactly the 8 full hits failed")
