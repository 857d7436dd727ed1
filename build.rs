//! Sets the ELF SONAME of the cdylib and keeps it from being unloaded: kvferry's threads may
//! outlive a `dlclose`. Everything else about packaging is CMake's.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        let (major, minor) = (
            env!("CARGO_PKG_VERSION_MAJOR"),
            env!("CARGO_PKG_VERSION_MINOR"),
        );
        // Before 1.0 every minor release may break the ABI: libkvferry.so.0.1
        let soversion = if major == "0" {
            format!("0.{minor}")
        } else {
            major.to_owned()
        };
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkvferry.so.{soversion}");
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
