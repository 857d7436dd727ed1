#!/usr/bin/env python3
"""check_docs.py [CHECK...]: holds the pages against what they describe. All checks, or those named:

    example   the README's program is examples/quickstart/main.cpp
    modules   the table of docs/architecture.md is the one that scripts/check-modules enforces
    changelog CHANGELOG.md names every exported function
    names     every kvf_ and KVF_ name in another page exists in the header or the tests
    tests     every test that the README's table names exists, and every command
    links     every relative link leads to a file, every `#part` to a heading"""

import importlib.machinery
import importlib.util
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True


def read(path):
    return (ROOT / path).read_text()


def pages():
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def example():
    blocks = re.findall(r"^```cpp\n(.*?)^```$", read("README.md"), re.M | re.S)
    if read("examples/quickstart/main.cpp") not in blocks:
        yield "README.md: no cpp block equals examples/quickstart/main.cpp"


def modules():
    """Rows are `| `a` | what it holds | `b`, `c` |`, in the first section."""
    path = str(ROOT / "scripts/check-modules")
    loader = importlib.machinery.SourceFileLoader("check_modules", path)
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_modules", loader))
    loader.exec_module(script)
    section = re.split(r"^## ", read("docs/architecture.md"), flags=re.M)[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", section, re.M)
    table = {name: set(re.findall(r"`(\w+)`", uses)) for name, uses in rows}
    enforced = {name: set(uses.split()) for name, uses in script.MAY_USE.items()}
    for name in sorted(table.keys() | enforced.keys()):
        if table.get(name) != enforced.get(name):
            yield f"docs/architecture.md: {name} {table.get(name)}, enforced {enforced.get(name)}"


def changelog():
    named = set(re.findall(r"\bkvf_\w+", read("CHANGELOG.md")))
    for symbol in read("cmake/kvferry.symbols").split():
        if symbol not in named:
            yield f"CHANGELOG.md does not name {symbol}"


def names():
    """A name that ends with `_` stands for a family and must be the start of one."""
    # Tests have names of their own: an environment variable, a CMake function.
    files = [ROOT / "include/kvferry.h"]
    files += [f for d in ("tests", "cpp_tests") for f in (ROOT / d).rglob("*.*") if f.is_file()]
    known = {name for f in files for name in re.findall(r"\b(?:kvf|KVF)_\w+", f.read_text())}
    # The changelog may name what a later version has removed.
    for page in (p for p in pages() if p.name != "CHANGELOG.md"):
        for name in sorted(set(re.findall(r"\b(?:kvf|KVF)_\w+", page.read_text()))):
            family = name.endswith("_") and any(k.startswith(name) for k in known)
            if name not in known and not family:
                yield f"{page.relative_to(ROOT)}: {name} is not in kvferry.h"


def tests():
    """The last column of "What works": `name` of a test, or a command."""
    section = re.search(r"^## What works$.*?(?=^## )", read("README.md"), re.M | re.S)[0]
    code = "".join(f.read_text() for f in (ROOT / "cpp_tests").rglob("*.*") if f.is_file())
    code += "".join(f.read_text() for f in (ROOT / "examples").rglob("CMakeLists.txt"))
    for row in re.findall(r"^\|.*\|.*\|([^|]*)\|$", section, re.M):
        for name in re.findall(r"`([^`]+)`", row):
            program = name.split()[0].removeprefix("build/bin/")
            kind, _, case = name.partition(".")
            if program.startswith("scripts/"):
                there = (ROOT / program).exists()
            elif program.startswith("kvferry-"):
                there = f"kvf_tool({program} " in read("tools/CMakeLists.txt")
            elif kind == "rust":
                there = (ROOT / f"tests/{case}.rs").exists()
            elif kind == "net" and "." in case:
                there = f"def {case.split('.')[1]}(" in read("cpp_tests/net/net_test.py")
            elif kind == "consumer" and case:
                there = re.search(rf"_case [^)]*\b{case}\b", code)
            else:
                there = re.search(rf"\b{re.escape(name)}", code)
            if not there:
                yield f"README.md: {name} is no test and no command"


def anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links():
    for page in pages():
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+:", target):
                continue
            path, _, part = target.partition("#")
            file = (page.parent / path) if path else page
            if not file.exists():
                yield f"{page.relative_to(ROOT)}: {target} is not there"
            elif part and part not in map(anchor, re.findall(r"^#+ (.*)$", file.read_text(), re.M)):
                yield f"{page.relative_to(ROOT)}: no heading {target}"


def main():
    """Returns the exit status."""
    checks = {f.__name__: f for f in (example, modules, changelog, names, tests, links)}
    chosen = sys.argv[1:] or list(checks)
    wrong = [line for name in chosen for line in checks[name]()]
    print("\n".join(wrong) or f"the pages are right: {', '.join(chosen)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
