# The tools as programs; the numbers of kvferry-bench are looked at elsewhere, here only its work.
foreach(_class Info Plan Bench Scale)
  string(TOLOWER ${_class} _name)
  add_test(NAME tools.${_name}
           COMMAND Python3::Interpreter "${CMAKE_CURRENT_SOURCE_DIR}/tools_test.py" -v ${_class})
  set_tests_properties(tools.${_name} PROPERTIES LABELS cpp TIMEOUT 180
    ENVIRONMENT "KVFERRY_TOOLS=$<TARGET_FILE_DIR:kvferry-info>")
endforeach()
# The comparison with other libraries: the harness with a fake peer, and with the real ones.
foreach(_test all_take_their_turn a_wrong_peer_is_named_and_left_out
        a_silent_peer_does_not_hold_up_the_rest)
  add_test(NAME peers.${_test}
           COMMAND Python3::Interpreter "${CMAKE_CURRENT_SOURCE_DIR}/peers_test.py" -v
                   Peers.test_${_test})
  set_tests_properties(peers.${_test} PROPERTIES LABELS cpp TIMEOUT 600
    ENVIRONMENT "KVFERRY_TOOLS=$<TARGET_FILE_DIR:kvferry-info>")
endforeach()
add_test(NAME long.peers
         COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/benches/peers/run" --quick
                 --bench "$<TARGET_FILE:kvferry-bench>" --out "${CMAKE_CURRENT_BINARY_DIR}/peers")
set_tests_properties(long.peers PROPERTIES LABELS long TIMEOUT 3600 RUN_SERIAL ON)
add_test(NAME tools.golden_plans
         COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/tests/python/check_vectors.py"
                 "$<TARGET_FILE:kvferry-info>" "${PROJECT_SOURCE_DIR}/tests/vectors/reshard.json")
set_tests_properties(tools.golden_plans PROPERTIES LABELS cpp TIMEOUT 120)
