# Run at build time: cmake -DSOURCE=... -DOUTPUT=... -P GitRevision.cmake. Writes a header with the git revision, with
# "-dirty" when the tree was not clean, or "unknown" outside a repository. Unchanged content leaves the file alone.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --abbrev=40 --dirty --exclude=*
  WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed OR NOT revision)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#pragma once\n#define DSPATTN_REVISION \"@revision@\"\n" @ONLY)
