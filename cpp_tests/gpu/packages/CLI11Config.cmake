# Headers that scripts/gpu-test has packed.
if(NOT TARGET CLI11::CLI11)
  add_library(CLI11::CLI11 INTERFACE IMPORTED GLOBAL)
  target_include_directories(CLI11::CLI11 SYSTEM INTERFACE
    "${CMAKE_CURRENT_LIST_DIR}/../../../third_party/include")
endif()
