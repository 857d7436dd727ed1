# The tools as programs; the numbers of kvferry-bench are looked at elsewhere, here only its work.
foreach(_class Info Plan Bench)
  string(TOLOWER ${_class} _name)
  add_test(NAME tools.${_name}
           COMMAND Python3::Interpreter "${CMAKE_CURRENT_SOURCE_DIR}/tools_test.py" -v ${_class})
  set_tests_properties(tools.${_name} PROPERTIES LABELS cpp TIMEOUT 180
    ENVIRONMENT "KVFERRY_TOOLS=$<TARGET_FILE_DIR:kvferry-info>")
endforeach()
add_test(NAME tools.golden_plans
         COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/tests/python/check_vectors.py"
                 "$<TARGET_FILE:kvferry-info>" "${PROJECT_SOURCE_DIR}/tests/vectors/reshard.json")
set_tests_properties(tools.golden_plans PROPERTIES LABELS cpp TIMEOUT 120)
