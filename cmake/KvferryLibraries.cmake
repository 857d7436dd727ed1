# kvferry::kvferry (shared) and kvferry::static, as seen from this build tree.
set(KVFERRY_SYSTEM_LIBS pthread dl m) # what Rust's std needs besides libgcc_s and libc
set(KVFERRY_SYMBOLS "${PROJECT_SOURCE_DIR}/cmake/kvferry.symbols")

# kvferry_add_shared(<target> <version> <soversion>): CMake and not cargo links, since a cargo
# cdylib cannot carry a symbol-version node, without which two versions in one process mix.
function(kvferry_add_shared target version soversion)
  set(KVFERRY_NODE "KVFERRY_${soversion}")
  set(map "${CMAKE_CURRENT_BINARY_DIR}/${target}.map")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/kvferry.map.in" "${map}" @ONLY)
  set(anchor "${CMAKE_CURRENT_BINARY_DIR}/${target}_anchor.c")
  file(CONFIGURE OUTPUT "${anchor}" CONTENT "typedef int kvferry_code_is_in_the_archive;\n")
  add_library(${target} SHARED "${anchor}")
  add_dependencies(${target} kvferry_cargo)
  target_link_libraries(${target} PRIVATE ${KVFERRY_SYSTEM_LIBS})
  target_link_options(${target} PRIVATE
    "LINKER:--whole-archive,${KVFERRY_ARCHIVE},--no-whole-archive"
    "LINKER:--version-script=${map}" "LINKER:--gc-sections" "LINKER:-z,defs" "LINKER:-z,nodelete")
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME kvferry VERSION ${version} SOVERSION ${soversion}
    LINK_DEPENDS "${map};${KVFERRY_ARCHIVE}")
  target_include_directories(${target} INTERFACE "${PROJECT_SOURCE_DIR}/include")
endfunction()

kvferry_add_shared(kvferry ${PROJECT_VERSION} ${KVFERRY_SOVERSION})
set_target_properties(kvferry PROPERTIES
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/lib")
add_library(kvferry::kvferry ALIAS kvferry)

# The archive of cargo cannot be linked beside another Rust library's (engines already link Rust
# tokenizers): cmake/static.cmake makes one object of it that shares no symbol with anybody.
set(KVFERRY_STATIC "${CMAKE_CURRENT_BINARY_DIR}/lib/libkvferry.a")
add_custom_command(OUTPUT "${KVFERRY_STATIC}"
  COMMAND ${CMAKE_COMMAND} -DARCHIVE=${KVFERRY_ARCHIVE} -DOUTPUT=${KVFERRY_STATIC}
          -DSYMBOLS=${KVFERRY_SYMBOLS}
          -DLD=${CMAKE_LINKER} -DOBJCOPY=${CMAKE_OBJCOPY}
          -DAR=${CMAKE_AR} -P "${PROJECT_SOURCE_DIR}/cmake/static.cmake"
  DEPENDS "${KVFERRY_ARCHIVE}" "${KVFERRY_SYMBOLS}" "${PROJECT_SOURCE_DIR}/cmake/static.cmake"
  COMMENT "libkvferry.a: making Rust's own symbols local" VERBATIM)
set(_all ALL)
if(NOT KVFERRY_IS_TOP_LEVEL)
  set(_all) # built when something links it
endif()
add_custom_target(kvferry_static_archive ${_all} DEPENDS "${KVFERRY_STATIC}")
add_dependencies(kvferry_static_archive kvferry_cargo)

add_library(kvferry_static STATIC IMPORTED GLOBAL)
add_dependencies(kvferry_static kvferry_static_archive)
set_target_properties(kvferry_static PROPERTIES
  IMPORTED_LOCATION "${KVFERRY_STATIC}"
  INTERFACE_INCLUDE_DIRECTORIES "${PROJECT_SOURCE_DIR}/include"
  INTERFACE_LINK_LIBRARIES "${KVFERRY_SYSTEM_LIBS}")
add_library(kvferry::static ALIAS kvferry_static)
