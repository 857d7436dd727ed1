//! The header alone, and uses of its `_INIT` macros, compile without a warning as C11 to C++20.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::process::Command;

/// Every `_INIT` macro used once; C code that is C++ too.
fn program(header: &str) -> String {
    let mut text = String::from(
        "#include <kvferry.h>\nuint32_t use(void);\nuint32_t use(void) {\n  uint32_t sum = 0;\n",
    );
    let macros = header.lines().filter_map(|line| {
        let name = line.strip_prefix("#define ")?.split_whitespace().next()?;
        name.strip_suffix("_INIT")
    });
    for (i, name) in macros.enumerate() {
        let ty = name.to_lowercase();
        text += &format!(
            "  {ty} x{i} = {name}_INIT;\n  sum += (uint32_t)sizeof(x{i}) + ((unsigned char *)&x{i})[0];\n"
        );
    }
    text + "  return sum + KVF_ABI_VERSION + KVF_VERSION;\n}\n"
}

/// The form of macro that tests/header.rs writes, with every kind of field.
const SAMPLE: &str = "
#include <kvferry.h>
typedef void (*kvf_sample_fn)(uint32_t level);
typedef struct kvf_sample_pair { double a; uint32_t b[3]; } kvf_sample_pair;
typedef struct kvf_sample {
  size_t struct_size; uint32_t abi_version; uint32_t workers;
  const uint64_t *slots; uint64_t first; kvf_sample_fn log; void (*done)(void);
  kvf_sample_pair pair; kvf_sample_pair pairs[2]; kvf_status cause; uint32_t reserved;
} kvf_sample;
#define KVF_SAMPLE_INIT \\
    {sizeof(kvf_sample), KVF_ABI_VERSION, 0, NULL, 0, NULL, NULL, {0.0, {0}}, \\
     {{0.0, {0}}}, KVF_OK, 0}
uint32_t use(void);
uint32_t use(void) { kvf_sample x = KVF_SAMPLE_INIT; return x.reserved; }
";

#[test]
#[cfg_attr(miri, ignore)]
fn header_and_its_macros_compile_without_warnings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = root.join("include");
    let header = std::fs::read_to_string(include.join("kvferry.h")).unwrap();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(dir.join("alone.c"), "#include <kvferry.h>\n").unwrap();
    std::fs::write(dir.join("uses.c"), program(&header)).unwrap();
    std::fs::write(dir.join("sample.c"), SAMPLE).unwrap();

    for std in ["c11", "c17", "c++11", "c++14", "c++17", "c++20"] {
        let cpp = std.starts_with("c++");
        let host = &format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let tool = cc::Build::new()
            .cpp(cpp)
            .cargo_metadata(false)
            .target(host)
            .host(host)
            .opt_level(0)
            .out_dir(dir)
            .get_compiler();
        for source in ["alone.c", "uses.c", "sample.c"] {
            let mut command = Command::new(tool.path());
            command
                .args(["-x", if cpp { "c++" } else { "c" }, &format!("-std={std}")])
                .args([
                    "-Wall",
                    "-Wextra",
                    "-Wpedantic",
                    "-Werror",
                    "-fsyntax-only",
                    "-I",
                ])
                .args([&include, &dir.join(source)]);
            let output = command.output().unwrap();
            assert!(
                output.status.success(),
                "{source} as {std}:\n{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
}
