# cmake -DARCHIVE= -DOUTPUT= -DSYMBOLS= -DLD= -DOBJCOPY= -DAR= -P static.cmake
#
# Turns cargo's archive into one with a single object whose only global symbols are kvf_*.
# Two Rust archives of different compilers otherwise fail to link together: both define
# rust_eh_personality. It and the reference to it get names of their own; they cannot just be made
# local, because the unwind tables refer to them across section groups.
cmake_minimum_required(VERSION 3.22)

file(STRINGS "${SYMBOLS}" symbols)
set(keep)
foreach(symbol IN LISTS symbols)
  list(APPEND keep -u ${symbol})
endforeach()
set(object "${OUTPUT}.o")
get_filename_component(_dir "${OUTPUT}" DIRECTORY)
file(MAKE_DIRECTORY "${_dir}")
execute_process(COMMAND "${LD}" -r --gc-sections ${keep} -o "${object}" "${ARCHIVE}"
                COMMAND_ERROR_IS_FATAL ANY)
# ld leaves names that only removed code used, which would become strong references, also to
# functions of a newer libc: strip them in the same step.
execute_process(
  COMMAND "${OBJCOPY}" --wildcard --strip-unneeded-symbol=* --keep-symbol=kvf_*
          --redefine-sym rust_eh_personality=kvferry_rust_eh_personality
          --redefine-sym DW.ref.rust_eh_personality=DW.ref.kvferry_rust_eh_personality "${object}"
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(
  # Without Rust's bitcode, on which the plugin of an older LLVM aborts ar and nm.
  COMMAND "${OBJCOPY}" --remove-section=.llvmbc --remove-section=.llvmcmd
          --wildcard --keep-global-symbol=kvf_*
          --keep-global-symbol=DW.ref.kvferry_* "${object}"
  COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE "${OUTPUT}") # ar would add to an old one
execute_process(COMMAND "${AR}" rcs "${OUTPUT}" "${object}" COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE "${object}")
