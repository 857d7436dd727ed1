#!/usr/bin/env bash
# consumers.sh CASE: one way in which users meet the package. ctest sets the environment:
# SOURCE, BUILD (kvferry's build tree), WORK (scratch), VERSION, LIBDIR, CC, CXX, CARGO.
set -euo pipefail
case=$1
work="$WORK/$case"
rm -rf "$work"
mkdir -p "$work"
unset LD_LIBRARY_PATH PKG_CONFIG_PATH CMAKE_PREFIX_PATH

configure() { # DIR ARGS...
  cmake -S "$1" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_C_COMPILER="$CC" "${@:2}"
}
build_and_run() {
  cmake --build "$work/build"
  ctest --test-dir "$work/build" --output-on-failure --no-tests=error
}
install_and_move() {
  cmake --install "$BUILD" --prefix "$work/first" >/dev/null
  mv "$work/first" "$work/moved"
}

case $case in
  find_package)
    install_and_move
    configure "$SOURCE/examples/consumer" -DCMAKE_PREFIX_PATH="$work/moved"
    build_and_run
    # Nothing of the package may name a place: it was moved once and may be again.
    if grep -rIl "$work/first" "$work/moved"; then
      echo "these files name the first prefix"
      exit 1
    fi
    lib="$work/moved/$LIBDIR/libkvferry.so.$VERSION"
    if readelf -S "$lib" | grep -E '\.(symtab|debug_)'; then
      echo "the installed library is not stripped"
      exit 1
    fi
    # The next minor release is another ABI, and an older one may lack what is asked for.
    for asked in 0.0 0.99 1.0; do
      sed "s/find_package(kvferry 0.1/find_package(kvferry $asked/" \
        "$SOURCE/examples/consumer/CMakeLists.txt" >"$work/CMakeLists.txt"
      cp "$SOURCE/examples/consumer/main.cpp" "$work/"
      if cmake -S "$work" -B "$work/refused-$asked" -DCMAKE_PREFIX_PATH="$work/moved" >/dev/null 2>&1; then
        echo "find_package(kvferry $asked) took $VERSION"
        exit 1
      fi
    done
    ;;
  add_subdirectory | fetchcontent)
    fetch=OFF
    [ "$case" = fetchcontent ] && fetch=ON
    # The same target directory only saves compiling the same library again.
    configure "$SOURCE/examples/consumer_subdir" -DUSE_FETCHCONTENT=$fetch \
      -DKVFERRY_CARGO_TARGET_DIR="$BUILD/cargo"
    grep -q '^CMAKE_BUILD_TYPE:STRING=$' "$work/build/CMakeCache.txt" # the user's stays the user's
    build_and_run
    if [ "$(ctest --test-dir "$work/build" -N | grep -c 'Test *#')" != 2 ]; then
      echo "kvferry added its own tests to the user's project"
      exit 1
    fi
    ;;
  pkg_config)
    install_and_move
    export PKG_CONFIG_PATH="$work/moved/$LIBDIR/pkgconfig"
    [ "$(pkg-config --modversion kvferry)" = "$VERSION" ]
    # shellcheck disable=SC2046
    "$CXX" -std=c++17 "$SOURCE/examples/consumer/main.cpp" $(pkg-config --cflags --libs kvferry) -o "$work/shared"
    LD_LIBRARY_PATH="$work/moved/$LIBDIR" "$work/shared"
    rm "$work/moved/$LIBDIR"/libkvferry.so*
    # shellcheck disable=SC2046
    "$CXX" -std=c++17 "$SOURCE/examples/consumer/main.cpp" $(pkg-config --static --cflags --libs kvferry) -o "$work/static"
    "$work/static"
    ;;
  foreign_rust)
    # A test build, because a released kvferry has no function that panics.
    CARGO_TARGET_DIR="$CARGO_TEST_DIR" "$CARGO" rustc --locked --lib --crate-type staticlib \
      --features testing --manifest-path "$SOURCE/Cargo.toml"
    (cat "$SOURCE/cmake/kvferry.symbols"; echo kvf_testing_panic) >"$work/symbols"
    cmake -DARCHIVE="$CARGO_TEST_DIR/debug/libkvferry.a" -DOUTPUT="$work/libkvferry.a" \
      -DSYMBOLS="$work/symbols" -DLD=ld -DOBJCOPY=objcopy -DAR=ar -P "$SOURCE/cmake/static.cmake"
    # Another compiler where there is one: the case that needs the cure most.
    compiler=(rustc)
    if rustup run nightly rustc -V >/dev/null 2>&1; then compiler=(rustup run nightly rustc); fi
    "${compiler[@]}" -V
    "${compiler[@]}" --edition 2024 --crate-type staticlib -o "$work/libforeign.a" \
      "$SOURCE/cpp_tests/package/foreign.rs"
    for order in "kvferry foreign" "foreign kvferry"; do
      # shellcheck disable=SC2086
      "$CC" -I"$SOURCE/include" "$SOURCE/cpp_tests/package/foreign.c" -L"$work" \
        $(printf ' -l:lib%s.a' $order) -lpthread -ldl -lm -o "$work/both"
      "$work/both"
    done
    ;;
  ctypes | python_pull)
    CARGO_TARGET_DIR="$BUILD/cargo-build" "$CARGO" build --locked --release \
      --manifest-path "$SOURCE/Cargo.toml"
    if [ "$case" = python_pull ]; then
      for way in shm unix tcp; do
        KVFERRY_TRANSPORTS=$way python3 "$SOURCE/examples/python/pull.py" \
          "$BUILD/cargo-build/release/libkvferry.so" | tee "$work/said"
        grep -F " through $way, " "$work/said"
      done
      exit
    fi
    python3 "$SOURCE/cpp_tests/package/version.py" "$BUILD/cargo-build/release/libkvferry.so" "$VERSION"
    readelf -d "$BUILD/cargo-build/release/libkvferry.so" | grep -F "libkvferry.so.${VERSION%.*}"
    ;;
  *)
    echo "no such case: $case"
    exit 2
    ;;
esac
