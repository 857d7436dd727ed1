# Target kvferry_cargo: runs cargo once per build; cargo itself decides what is stale.
# Sets KVFERRY_ARCHIVE, the Rust static archive as cargo makes it.
find_program(KVFERRY_CARGO NAMES cargo HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin" REQUIRED
             DOC "cargo")

# A plain string, because one library serves all configurations of a multi-config generator.
set(_default release)
if(CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(_default dev)
endif()
set(KVFERRY_CARGO_PROFILE ${_default} CACHE STRING "Cargo profile of the library")
set(KVFERRY_CARGO_TARGET "" CACHE STRING "Rust target triple; empty: the host")
set(KVFERRY_CARGO_FEATURES "" CACHE STRING "Cargo features, comma separated")
set(KVFERRY_CARGO_FLAGS "" CACHE STRING "Further arguments of cargo (list)")
set(KVFERRY_CARGO_ENV "" CACHE STRING "Environment of cargo (list of NAME=value)")
# Inside the build tree: two trees never wait for each other, and removing one removes all.
set(KVFERRY_CARGO_TARGET_DIR "${CMAKE_CURRENT_BINARY_DIR}/cargo" CACHE PATH "Cargo's target directory")

set(_out "${KVFERRY_CARGO_TARGET_DIR}")
set(_args)
if(KVFERRY_CARGO_TARGET)
  string(APPEND _out "/${KVFERRY_CARGO_TARGET}")
  list(APPEND _args --target ${KVFERRY_CARGO_TARGET})
endif()
if(KVFERRY_CARGO_PROFILE STREQUAL "dev")
  string(APPEND _out "/debug") # cargo's one exception
else()
  string(APPEND _out "/${KVFERRY_CARGO_PROFILE}")
endif()
if(KVFERRY_CARGO_FEATURES)
  list(APPEND _args --features ${KVFERRY_CARGO_FEATURES})
endif()

set(KVFERRY_ARCHIVE "${CMAKE_CURRENT_BINARY_DIR}/rust/libkvferry.a")
# `cargo rustc --crate-type`: with the rlib in the set cargo skips LTO without a word.
add_custom_target(kvferry_cargo
  COMMAND ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${KVFERRY_CARGO_TARGET_DIR}" ${KVFERRY_CARGO_ENV}
          "${KVFERRY_CARGO}" rustc --locked --lib --crate-type staticlib
          --profile ${KVFERRY_CARGO_PROFILE} --manifest-path "${PROJECT_SOURCE_DIR}/Cargo.toml"
          ${_args} ${KVFERRY_CARGO_FLAGS}
  COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/rust"
  COMMAND ${CMAKE_COMMAND} -E copy_if_different "${_out}/libkvferry.a" "${KVFERRY_ARCHIVE}"
  BYPRODUCTS "${KVFERRY_ARCHIVE}"
  COMMENT "cargo: libkvferry (${KVFERRY_CARGO_PROFILE})"
  USES_TERMINAL VERBATIM COMMAND_EXPAND_LISTS)
