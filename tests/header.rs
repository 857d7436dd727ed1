//! `include/kvferry.h`, `cmake/kvferry.symbols` and `cpp_tests/struct_layout.inc` are exactly what
//! the sources say.
//!
//! `KVF_UPDATE_HEADER=1 cargo test --test header` rewrites them.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// cbindgen returns Ok after "can't find type" and "skipping constant"; only its log tells.
struct Warnings(Mutex<Vec<String>>);
static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

impl log::Log for Warnings {
    fn enabled(&self, meta: &log::Metadata<'_>) -> bool {
        meta.level() <= log::Level::Warn
    }
    fn log(&self, record: &log::Record<'_>) {
        let text = record.args().to_string();
        // A private constant is not meant for C.
        if self.enabled(record.metadata()) && !text.ends_with("(not `pub`).") {
            self.0.lock().unwrap().push(text);
        }
    }
    fn flush(&self) {}
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files that may hold C items: cbindgen sees only these, so a `pub const` of the core never
/// lands in the header.
fn abi_sources() -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(root().join("src/ffi"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            // cbindgen follows the `mod` lines of mod.rs, which would show it everything twice.
            name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "mod.rs"
        })
        .collect();
    files.sort();
    files.insert(0, root().join("src/error.rs"));
    files
}

/// What the ABI sources declare, as Rust sees it.
#[derive(Default)]
struct Sources {
    structs: BTreeMap<String, syn::ItemStruct>,
    aliases: BTreeMap<String, syn::Type>,
    functions: Vec<String>,
    /// Only with feature `testing`.
    testing_functions: Vec<String>,
    foreign_constants: Vec<String>,
}

impl Sources {
    fn read() -> Self {
        let mut all = Self::default();
        for path in abi_sources() {
            let text = std::fs::read_to_string(&path).unwrap();
            all.add(syn::parse_file(&text).unwrap().items);
        }
        all
    }

    fn add(&mut self, items: Vec<syn::Item>) {
        for item in items {
            match item {
                syn::Item::Struct(item) => {
                    self.structs.insert(item.ident.to_string(), item);
                }
                syn::Item::Type(item) => {
                    self.aliases.insert(item.ident.to_string(), *item.ty);
                }
                syn::Item::Const(item) if !item.ident.to_string().starts_with("KVF_") => {
                    self.foreign_constants.push(item.ident.to_string());
                }
                syn::Item::Fn(item) if item.sig.abi.is_some() => {
                    let name = item.sig.ident.to_string();
                    let attrs = item.attrs.iter().map(|attr| tokens(&attr.meta));
                    let attrs = attrs.collect::<Vec<_>>().join(" ");
                    if !attrs.contains("no_mangle") {
                        continue; // a callback of a test or of the library itself
                    }
                    assert!(
                        matches!(item.vis, syn::Visibility::Public(_)) && name.starts_with("kvf_"),
                        "{name}: exported functions are `pub` and start with kvf_"
                    );
                    if attrs.contains("cfg") {
                        assert!(
                            name.starts_with("kvf_testing_"),
                            "{name} depends on a feature"
                        );
                        self.testing_functions.push(name);
                    } else {
                        self.functions.push(name);
                    }
                }
                _ => {}
            }
        }
    }

    /// A positional initializer: every field and nested field, zero, so that no use of it warns.
    fn zero(&self, ty: &syn::Type) -> String {
        match ty {
            syn::Type::Ptr(_) | syn::Type::BareFn(_) => "NULL".to_owned(),
            syn::Type::Array(array) => {
                let element = self.zero(&array.elem);
                // One element is enough, except for the warning about missing fields.
                format!("{{{element}}}")
            }
            syn::Type::Path(path) => {
                let last = path.path.segments.last().unwrap();
                let name = last.ident.to_string();
                match name.as_str() {
                    "Option" => "NULL".to_owned(),
                    "kvf_status" => "KVF_OK".to_owned(),
                    "f32" | "f64" => "0.0".to_owned(),
                    _ if self.aliases.contains_key(&name) => self.zero(&self.aliases[&name]),
                    _ if self.structs.contains_key(&name) => self.initializer(&name),
                    "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64"
                    | "isize" | "c_char" | "c_int" => "0".to_owned(),
                    _ => panic!("no zero is known for the type {name}: C fills integers, not this"),
                }
            }
            other => panic!("no zero is known for {}", tokens(other)),
        }
    }

    fn initializer(&self, name: &str) -> String {
        let fields = self.structs[name].fields.iter().map(|field| {
            let field_name = field.ident.as_ref().unwrap().to_string();
            match field_name.as_str() {
                "struct_size" => format!("sizeof({name})"),
                "abi_version" => "KVF_ABI_VERSION".to_owned(),
                _ => match field_name.strip_suffix("_elem_size") {
                    // The size that the caller was compiled with, so that nobody forgets it.
                    Some(array) => format!("sizeof({})", self.element(name, array)),
                    None => self.zero(&field.ty),
                },
            }
        });
        format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
    }

    /// The struct that the array field `array` of `name` points to.
    fn element(&self, name: &str, array: &str) -> String {
        let mut fields = self.structs[name].fields.iter();
        let field = fields.find(|field| field.ident.as_ref().unwrap() == array);
        match field.map(|field| &field.ty) {
            Some(syn::Type::Ptr(ptr)) => tokens(&ptr.elem),
            _ => panic!("{name}.{array}_elem_size stands beside no array {array}"),
        }
    }

    /// Every struct that C sees and fills: those with a head, and elements of arrays.
    fn abi_structs(&self) -> impl Iterator<Item = (&String, &syn::ItemStruct)> {
        self.structs.iter().filter(|(_, item)| {
            let repr_c = |attr: &syn::Attribute| tokens(&attr.meta).replace(' ', "") == "repr(C)";
            item.attrs.iter().any(repr_c)
        })
    }

    /// Bytes of a field on 64-bit Linux.
    fn size(&self, ty: &syn::Type) -> usize {
        match ty {
            syn::Type::Ptr(_) | syn::Type::BareFn(_) => 8,
            syn::Type::Array(array) => {
                let syn::Expr::Lit(syn::ExprLit {
                    lit: syn::Lit::Int(len),
                    ..
                }) = &array.len
                else {
                    panic!("an array's length must be a number: {}", tokens(array));
                };
                self.size(&array.elem) * len.base10_parse::<usize>().unwrap()
            }
            syn::Type::Path(path) => {
                let name = path.path.segments.last().unwrap().ident.to_string();
                match name.as_str() {
                    "u8" | "i8" | "c_char" => 1,
                    "u16" | "i16" => 2,
                    "u32" | "i32" | "f32" | "c_int" | "kvf_status" => 4,
                    "u64" | "i64" | "f64" | "usize" | "isize" | "Option" => 8,
                    _ if self.aliases.contains_key(&name) => self.size(&self.aliases[&name]),
                    _ => {
                        let fields = &self.structs[&name].fields;
                        fields.iter().map(|field| self.size(&field.ty)).sum()
                    }
                }
            }
            other => panic!("no size is known for {}", tokens(other)),
        }
    }

    /// The promise that abi_test.cpp holds against the C++ compiler. Without padding, which
    /// `abi_struct!` proves, an offset is the sum of what stands before.
    fn layout(&self) -> String {
        let mut text = String::from(
            "// Sizes and offsets on 64-bit Linux, included by abi_test.cpp; written by \
             tests/header.rs\n// (KVF_UPDATE_HEADER=1). Rows may be added. A changed or vanished \
             row breaks every compiled caller,\n// so it needs a new minor version.\n\
             // clang-format off\n",
        );
        for (name, item) in self.abi_structs() {
            let mut at = 0;
            let mut rows = String::new();
            for field in &item.fields {
                let field_name = field.ident.as_ref().unwrap();
                rows += &format!("OFFSET({name}, {field_name}, {at}),\n");
                at += self.size(&field.ty);
            }
            text += &format!("SIZE({name}, {at}),\n{rows}");
        }
        text
    }

    fn init_macros(&self) -> String {
        let mut text = String::from(
            "/* Initial values: every field zero (its default), the head filled in.\n \
             *   kvf_x x = KVF_X_INIT; */\n",
        );
        for (name, _) in self.abi_structs() {
            let define = format!("#define {}_INIT", name.to_uppercase());
            let value = self.initializer(name);
            if define.len() + 1 + value.len() <= 100 {
                text += &format!("{define} {value}\n");
            } else {
                text += &format!("{define} \\\n");
                text += &wrap(&value);
            }
        }
        text
    }
}

/// Breaks a long macro body after commas, with continuation backslashes.
fn wrap(value: &str) -> String {
    let mut lines = vec![String::from("    ")];
    for piece in value.split_inclusive(", ") {
        if lines[lines.len() - 1].len() + piece.len() > 96 {
            lines.push(String::from("     "));
        }
        let last = lines.len() - 1;
        lines[last] += piece;
    }
    let lines: Vec<_> = lines.iter().map(|line| line.trim_end()).collect();
    lines.join(" \\\n") + "\n"
}

fn tokens(item: &impl quote::ToTokens) -> String {
    item.to_token_stream().to_string()
}

fn generate(sources: &Sources) -> String {
    log::set_logger(&WARNINGS).unwrap();
    log::set_max_level(log::LevelFilter::Warn);

    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    let [major, minor, patch] = [
        env!("CARGO_PKG_VERSION_MAJOR"),
        env!("CARGO_PKG_VERSION_MINOR"),
        env!("CARGO_PKG_VERSION_PATCH"),
    ];
    // One source for the version: Cargo.toml.
    let versions = format!(
        "/* Version of this header; kvf_version() gives the loaded library's. */\n\
         #define KVF_VERSION_MAJOR {major}\n\
         #define KVF_VERSION_MINOR {minor}\n\
         #define KVF_VERSION_PATCH {patch}\n\
         #define KVF_VERSION \\\n    \
         ((uint32_t)KVF_VERSION_MAJOR << 24 | (uint32_t)KVF_VERSION_MINOR << 16 | \\\n     \
         (uint32_t)KVF_VERSION_PATCH)\n\
         #define KVF_VERSION_STRING \"{major}.{minor}.{patch}\""
    );
    let after = config.after_includes.take().unwrap();
    config.after_includes = Some(after.replace("@VERSIONS@", &versions));
    config
        .export
        .exclude
        .extend(sources.foreign_constants.clone());

    let mut builder = cbindgen::Builder::new().with_config(config);
    for path in abi_sources() {
        builder = builder.with_src(path);
    }
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    let text = String::from_utf8(text).unwrap();
    assert_eq!(*WARNINGS.0.lock().unwrap(), Vec::<String>::new());

    let (body, end) = text.rsplit_once("#endif  /* KVFERRY_H */").unwrap();
    assert_eq!(end.trim(), "");
    format!("{body}{}\n#endif  /* KVFERRY_H */\n", sources.init_macros())
}

/// Without comments, so that a function named in prose is not a declaration.
fn code_of(header: &str) -> String {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, after)) = rest.split_once("/*") {
        code += before;
        rest = after.split_once("*/").unwrap().1;
    }
    code + rest
}

fn up_to_date(path: &str, fresh: &str) {
    let path = root().join(path);
    if std::env::var_os("KVF_UPDATE_HEADER").is_some() {
        std::fs::write(&path, fresh).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        fresh == committed,
        "{} is stale: run KVF_UPDATE_HEADER=1 cargo test --test header",
        path.display()
    );
}

#[test]
#[cfg_attr(miri, ignore)]
fn header_and_symbol_list_are_what_the_sources_say() {
    let mut sources = Sources::read();
    let header = generate(&sources);

    let code = code_of(&header);
    let declared = |name: &String| {
        let call = format!("{name}(");
        code.match_indices(&call)
            .any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    for name in sources.functions.iter().chain(&sources.testing_functions) {
        assert!(declared(name), "{name} is exported but not in the header");
    }
    let marked = code.matches("KVF_NOEXCEPT;").count();
    assert_eq!(
        marked,
        sources.functions.len() + sources.testing_functions.len(),
        "the header declares a function that is not exported, or one without KVF_NOEXCEPT"
    );
    for line in header
        .lines()
        .filter_map(|line| line.strip_prefix("#define "))
    {
        assert!(line.starts_with("KVF"), "not ours to define: {line}");
    }

    sources.functions.sort();
    up_to_date("include/kvferry.h", &header);
    up_to_date("cpp_tests/struct_layout.inc", &sources.layout());
    up_to_date(
        "cmake/kvferry.symbols",
        &(sources.functions.join("\n") + "\n"),
    );
}

/// The struct rules that the compiler cannot see.
#[test]
#[cfg_attr(miri, ignore)]
fn structs_of_the_abi_follow_its_rules() {
    let sources = Sources::read();
    for (name, item) in sources.abi_structs() {
        assert!(name.starts_with("kvf_"), "{name}");
        let fields: Vec<_> = item
            .fields
            .iter()
            .map(|field| (field.ident.as_ref().unwrap().to_string(), tokens(&field.ty)))
            .collect();
        let has = |at: usize, field: &str, ty: &str| {
            fields.get(at).is_some_and(|(f, t)| f == field && t == ty)
        };
        let headed = fields
            .iter()
            .any(|(field, _)| field == "struct_size" || field == "abi_version");
        assert!(
            !headed || (has(0, "struct_size", "usize") && has(1, "abi_version", "u32")),
            "{name} must start with `struct_size: usize, abi_version: u32`"
        );
        for field in &item.fields {
            let cfg = field.attrs.iter().any(|attr| attr.path().is_ident("cfg"));
            assert!(!cfg, "{name}: a field must not depend on a feature");
        }
    }
}

/// One struct of each kind of field: what is proven for it holds for the real ones.
const SAMPLE: &str = "
    pub type kvf_slot = u64;
    pub type kvf_log_fn = Option<unsafe extern \"C\" fn(level: u32)>;
    #[repr(C)] pub struct kvf_pair { pub a: f64, pub b: [u32; 3] }
    #[repr(C)] pub struct kvf_sample {
        pub struct_size: usize,
        pub abi_version: u32,
        pub workers: u32,
        pub slots: *const kvf_slot,
        pub first: kvf_slot,
        pub log: kvf_log_fn,
        pub done: Option<unsafe extern \"C\" fn()>,
        pub pair: kvf_pair,
        pub pairs: [kvf_pair; 2],
        pub cause: kvf_status,
        pub reserved: u32,
    }
    pub struct kvf_opaque { inner: u32 }
";

#[test]
fn init_macros_name_every_field() {
    let mut sources = Sources::default();
    sources.add(syn::parse_file(SAMPLE).unwrap().items);
    let macros = sources.init_macros();
    let want = "#define KVF_PAIR_INIT {0.0, {0}}\n\
                #define KVF_SAMPLE_INIT \\\n    \
                {sizeof(kvf_sample), KVF_ABI_VERSION, 0, NULL, 0, NULL, NULL, {0.0, {0}}, \
                {{0.0, {0}}}, \\\n     \
                KVF_OK, 0}\n";
    assert!(macros.ends_with(want), "{macros}");
}
