# Run by ctest: installs the build into a fresh folder, builds the consumer against that, and runs it.
#   cmake -DBUILD=... -DSOURCE=... -DWORK=... -DCOMPILER=... -P run.cmake
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}\nended with ${code}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
step(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G Ninja -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${COMPILER})
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/consumer)
if(NOT output STREQUAL "every value is 1, so every output is: 1 ... 1\n")
  message(FATAL_ERROR "the example printed:\n${output}")
endif()
step(${WORK}/prefix/bin/dspattn info)
