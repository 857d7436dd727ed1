# The Rust tests as ctest entries: one per file in tests/, one for the unit tests, one for the
# documentation's examples. Dev profile, in a target directory of their own.
set(KVFERRY_CARGO_TEST_DIR "${PROJECT_BINARY_DIR}/cargo-test" CACHE PATH
    "Cargo's target directory for tests")
set(_cargo ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${KVFERRY_CARGO_TEST_DIR}" ${KVFERRY_CARGO_ENV}
    "${KVFERRY_CARGO}" test --locked --features testing)

# kvf_rust_test(<name> <arguments of cargo test>...)
function(kvf_rust_test name)
  add_test(NAME rust.${name} COMMAND ${_cargo} ${ARGN}
           WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(rust.${name} PROPERTIES LABELS rust TIMEOUT 600 FIXTURES_REQUIRED rust_built)
endfunction()

add_test(NAME rust.build COMMAND ${_cargo} --no-run WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
set_tests_properties(rust.build PROPERTIES LABELS rust TIMEOUT 1800 RESOURCE_LOCK cargo
  FIXTURES_SETUP rust_built)
kvf_rust_test(unit --lib)
kvf_rust_test(doc --doc)
file(GLOB _files CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/tests"
     "${PROJECT_SOURCE_DIR}/tests/*.rs")
foreach(_file IN LISTS _files)
  string(REGEX REPLACE "\\.rs$" "" _name "${_file}")
  kvf_rust_test(${_name} --test ${_name})
endforeach()

# The state machines and queues under model checkers: a crate of its own with a target directory of
# its own, in a faster profile. Its lock file follows the library's dependencies by itself.
set(_models ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${PROJECT_BINARY_DIR}/cargo-models"
    ${KVFERRY_CARGO_ENV} "${KVFERRY_CARGO}" test)
add_test(NAME rust.models.build COMMAND ${_models} --no-run
         WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}/models")
set_tests_properties(rust.models.build PROPERTIES LABELS rust TIMEOUT 1800 RESOURCE_LOCK cargo
  FIXTURES_SETUP models_built)
add_test(NAME rust.models COMMAND ${_models} --no-fail-fast
         WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}/models")
set_tests_properties(rust.models PROPERTIES LABELS rust TIMEOUT 900 PROCESSORS 2
  FIXTURES_REQUIRED models_built)
add_test(NAME rust.models.long COMMAND ${_models} --test handoff --test random -- --include-ignored
         WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}/models")
set_tests_properties(rust.models.long PROPERTIES LABELS long TIMEOUT 3600 PROCESSORS 2
  FIXTURES_REQUIRED models_built ENVIRONMENT "KVFERRY_SEQUENCES=10000")

# The C interface from Rust under Miri, which sees what no C++ test can: a byte read past the
# caller's struct, a handle used after its end. Tests with files, threads' clocks or sockets are
# marked #[cfg_attr(miri, ignore)].
add_test(NAME rust.miri COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/miri.sh"
         WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
set_tests_properties(rust.miri PROPERTIES LABELS rust TIMEOUT 1800 SKIP_RETURN_CODE 77
  ENVIRONMENT "CARGO_TARGET_DIR=${PROJECT_BINARY_DIR}/cargo-miri")
