"""docs/lessons.md lists all 62 lessons, each with tests that exist or the reason why it has none."""

import pathlib
import re
import sys

root = pathlib.Path(__file__).resolve().parents[2]
sources = ""
for folder in ("src", "tests", "cpp_tests"):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix in (".rs", ".cpp") or path.name == "CMakeLists.txt":
            sources += path.read_text()

seen, wrong = [], []
for line in (root / "docs/lessons.md").read_text().splitlines():
    row = re.match(r"\| (\d+) \| .* \| (.*) \| (.*) \|$", line)
    if not row:
        continue
    number, lesson, tests = int(row[1]), row[2], re.findall(r"`([^`]+)`", row[3])
    seen.append(number)
    if not tests and not lesson.startswith("does not apply"):
        wrong.append(f"{number}: no test and no reason")
    for test in tests:
        name = test.split(".")[-1]
        if not re.search(rf"\b(fn |, |soak\.){name}\b", sources):
            wrong.append(f"{number}: no test {test}")
        if number not in [int(n) for n in re.findall(r"\d+", test)]:
            wrong.append(f"{number}: its number is not in {test}")
if seen != list(range(1, 63)):
    wrong.append(f"lessons listed: {seen}")
print("\n".join(wrong) or "62 lessons")
sys.exit(bool(wrong))
