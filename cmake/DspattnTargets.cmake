# How the project's targets are compiled.
add_library(dspattn_options INTERFACE)
target_compile_features(dspattn_options INTERFACE cxx_std_20)
target_include_directories(dspattn_options INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_options(dspattn_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wconversion>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${DSPATTN_WERROR}>>:-Werror>)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  # Clang counts changes of sign among the conversions; GCC does not.
  target_compile_options(dspattn_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-sign-conversion>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # A false alarm on std::string's operator+ (GCC bug 105651).
  target_compile_options(dspattn_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(DSPATTN_SANITIZE)
  target_compile_definitions(dspattn_options INTERFACE DSPATTN_SANITIZED)  # for tests that then do less
  # Two checks of "undefined" are of accesses that AddressSanitizer reports itself, for a sixth of the time that the CPU
  # kernels take to compile.
  set(dspattn_reported_twice)
  if(DSPATTN_SANITIZE MATCHES "address.*undefined")
    set(dspattn_reported_twice -fno-sanitize=null,object-size)
  endif()
  target_compile_options(dspattn_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DSPATTN_SANITIZE} ${dspattn_reported_twice} -fno-sanitize-recover=all
    -fno-omit-frame-pointer>)
  target_link_options(dspattn_options INTERFACE -fsanitize=${DSPATTN_SANITIZE})
endif()
if(DSPATTN_FUZZ)
  # Coverage counters in every layer; the fuzzers' own main comes with tests/fuzz.
  target_compile_options(dspattn_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

# dspattn_layer(NAME SOURCES...): one layer of src/ as an object library; the library dspattn joins them.
function(dspattn_layer name)
  add_library(dspattn_${name} OBJECT ${ARGN})
  set_target_properties(dspattn_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET default)
  target_link_libraries(dspattn_${name} PUBLIC dspattn_options)
endfunction()

# dspattn_brief(TARGET): a layer whose code runs briefly however often it is called, such as checks of arguments. With
# sanitizers it is mostly branches to their reports, and without optimisation it compiles in a third of the time. Not for
# the fuzzers, which call it all the time.
function(dspattn_brief name)
  if(DSPATTN_SANITIZE AND NOT DSPATTN_FUZZ)
    target_compile_options(dspattn_${name} PRIVATE -O0)
  endif()
endfunction()

# What of the library computes, for programs to name before their other sources: of an inline function that the compiler
# leaves a function, the linker takes the first copy for all, and the tests' unoptimised ones would serve the library,
# too: that took a third of the time of the sanitized tests and of the emulated ones. So would those of core, if it came
# before what is always optimised (dspattn_brief).
set(DSPATTN_OPTIMISED $<TARGET_OBJECTS:dspattn_cpu> $<TARGET_OBJECTS:dspattn_core>)

# dspattn_together(TARGET): its sources are compiled as one. For what is not the library: there every source is compiled
# alone in the release build, which shows that it includes what it uses.
function(dspattn_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endfunction()

# dspattn_around_library(TARGET): the program and the tests. What takes time runs in the library: here less optimisation
# saves a third of the compile time (-O1; GCC's -Og another quarter of what is left), with sanitizers 40 %.
function(dspattn_around_library target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Og>)
  if(DSPATTN_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()

# dspattn_tests_code(TARGET): the tests themselves, which are compiled more often than they run long: without optimisation
# a source takes three quarters of the time, and a program's sources as one half of that, for what GoogleTest and the
# standard library instantiate. What GCC warns of only when it optimises, sanitizers see in these same tests.
function(dspattn_tests_code target)
  dspattn_around_library(${target})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O0>)
  dspattn_together(${target})
endfunction()
