# cmake --install: headers, both libraries, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS logitless logitless_static EXPORT logitless-targets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/logitless" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

set(LOGITLESS_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/logitless")
install(EXPORT logitless-targets NAMESPACE logitless:: DESTINATION ${LOGITLESS_CMAKE_DIR})
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/logitless-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/logitless-config.cmake" INSTALL_DESTINATION ${LOGITLESS_CMAKE_DIR})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/logitless-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/logitless-config.cmake" "${PROJECT_BINARY_DIR}/logitless-config-version.cmake"
        DESTINATION ${LOGITLESS_CMAKE_DIR})

# pkg-config: the prefix follows from the file's own place, so an installed tree may be moved.
file(RELATIVE_PATH LOGITLESS_PC_PREFIX "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" LOGITLESS_PC_PREFIX "${LOGITLESS_PC_PREFIX}")
set(LOGITLESS_PC_CUDA)
if(LOGITLESS_HAS_CUDA)
  set(LOGITLESS_PC_CUDA " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/logitless.pc.in" "${PROJECT_BINARY_DIR}/logitless.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/logitless.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
