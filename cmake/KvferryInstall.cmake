# Install rules. Everything in the package is relative to its own place, so it may be moved.
include(CMakePackageConfigHelpers)
set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/kvferry")

install(FILES "${PROJECT_SOURCE_DIR}/include/kvferry.h" "${PROJECT_SOURCE_DIR}/include/kvferry.hpp"
              "${PROJECT_SOURCE_DIR}/include/kvferry_transceiver.hpp"
        TYPE INCLUDE)
install(TARGETS kvferry LIBRARY)
install(FILES "${KVFERRY_STATIC}" TYPE LIB)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" TYPE DOC)

# Always stripped: the debug lines of Rust's std are ten times the library.
if(CMAKE_STRIP)
  install(CODE "set(_lib \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}\")
execute_process(COMMAND \"${CMAKE_STRIP}\" --strip-unneeded \"\${_lib}/libkvferry.so.${PROJECT_VERSION}\"
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND \"${CMAKE_STRIP}\" --strip-debug \"\${_lib}/libkvferry.a\"
                COMMAND_ERROR_IS_FATAL ANY)")
endif()

# The targets are written by hand: install(EXPORT) cannot export an imported library.
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kvferryConfig.cmake.in"
  kvferryConfig.cmake INSTALL_DESTINATION "${_package}"
  PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
# Before 1.0 only the same minor release satisfies find_package(kvferry 0.1).
set(_compatible SameMajorVersion)
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(_compatible SameMinorVersion)
endif()
write_basic_package_version_file(kvferryConfigVersion.cmake COMPATIBILITY ${_compatible})
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvferryConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/kvferryConfigVersion.cmake"
        DESTINATION "${_package}")

list(TRANSFORM KVFERRY_SYSTEM_LIBS PREPEND "-l" OUTPUT_VARIABLE _private)
list(JOIN _private " " KVFERRY_PC_PRIVATE)
file(RELATIVE_PATH KVFERRY_PC_PREFIX "/p/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/p")
configure_file("${PROJECT_SOURCE_DIR}/cmake/kvferry.pc.in" kvferry.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/kvferry.pc"
        DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
