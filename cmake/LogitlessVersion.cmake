# LOGITLESS_VERSION from include/logitless/logitless.h, the only place that states it.
file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../include/logitless/logitless.h" _lines REGEX "^#define LL_VERSION_[A-Z]+ ")
foreach(_part MAJOR MINOR PATCH)
  if(NOT "${_lines}" MATCHES "LL_VERSION_${_part} ([0-9]+)")
    message(FATAL_ERROR "include/logitless/logitless.h does not define LL_VERSION_${_part} as a number")
  endif()
  list(APPEND _version "${CMAKE_MATCH_1}")
endforeach()
list(JOIN _version "." LOGITLESS_VERSION)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_CURRENT_LIST_DIR}/../include/logitless/logitless.h")
unset(_version)
unset(_lines)
