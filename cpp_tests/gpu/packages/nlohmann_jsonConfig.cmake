# Headers that scripts/gpu-test has packed.
if(NOT TARGET nlohmann_json::nlohmann_json)
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED GLOBAL)
  target_include_directories(nlohmann_json::nlohmann_json SYSTEM INTERFACE
    "${CMAKE_CURRENT_LIST_DIR}/../../../third_party/include")
endif()
