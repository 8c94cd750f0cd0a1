# cmake --install: the library, its headers and a package config for find_package(dspattn).
include(CMakePackageConfigHelpers)

install(TARGETS dspattn EXPORT dspattn
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/dspattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT dspattn NAMESPACE dspattn:: FILE dspattn-targets.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dspattn)
get_target_property(dspattn_type dspattn TYPE)
if(dspattn_type STREQUAL SHARED_LIBRARY AND DSPATTN_APPS)  # the installed program finds it beside itself
  file(RELATIVE_PATH dspattn_from_program ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(dspattn_cli PROPERTIES INSTALL_RPATH $ORIGIN/${dspattn_from_program})
endif()
set(DSPATTN_WITH_CUDA OFF)
if(CMAKE_CUDA_COMPILER)
  set(DSPATTN_WITH_CUDA ON)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/dspattn-config.cmake.in
  ${PROJECT_BINARY_DIR}/dspattn-config.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dspattn)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/dspattn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/dspattn-config.cmake ${PROJECT_BINARY_DIR}/dspattn-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/dspattn)
