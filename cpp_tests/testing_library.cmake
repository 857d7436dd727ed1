# kvferry_testing: the library with the feature `testing` (fault points, deviations), in cargo's
# dev profile and in the target directory of the Rust tests, so that little is compiled twice. The
# same SONAME and symbol versions as the real one: a test program runs on it by LD_LIBRARY_PATH.
set(KVFERRY_TESTING_DIR "${PROJECT_BINARY_DIR}/testing")
set(_testing_archive "${KVFERRY_TESTING_DIR}/libkvferry.a")
add_custom_target(kvferry_testing_cargo
  COMMAND ${CMAKE_COMMAND} -E env "CARGO_TARGET_DIR=${KVFERRY_CARGO_TEST_DIR}" ${KVFERRY_CARGO_ENV}
          "${KVFERRY_CARGO}" build --locked --lib --features testing
          --manifest-path "${PROJECT_SOURCE_DIR}/Cargo.toml"
  COMMAND ${CMAKE_COMMAND} -E make_directory "${KVFERRY_TESTING_DIR}"
  COMMAND ${CMAKE_COMMAND} -E copy_if_different "${KVFERRY_CARGO_TEST_DIR}/debug/libkvferry.a"
          "${_testing_archive}"
  BYPRODUCTS "${_testing_archive}"
  COMMENT "cargo: libkvferry for tests"
  USES_TERMINAL VERBATIM)
function(kvferry_add_testing_library)
  set(KVFERRY_ARCHIVE "${_testing_archive}")
  set(KVFERRY_SYMBOLS "")
  kvferry_add_shared(kvferry_testing ${PROJECT_VERSION} ${KVFERRY_SOVERSION})
  add_dependencies(kvferry_testing kvferry_testing_cargo)
  set_target_properties(kvferry_testing PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${KVFERRY_TESTING_DIR}")
endfunction()
kvferry_add_testing_library()
