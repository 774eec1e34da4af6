# What goes into the Python package, when scikit-build-core builds it: the library under its plain name (a wheel has no
# symbolic links) and the command line where its two header libraries are at hand; component `python`, nothing else.
if(NOT SKBUILD)
  return()
endif()

# AUTO: on where what it needs is there. The package works without; its `logitless` command then says what was missing.
find_package(CLI11 2.1 QUIET)
find_package(nlohmann_json 3.11 QUIET)
foreach(part BENCH CLI)
  if(LOGITLESS_BUILD_${part} STREQUAL "AUTO")
    if(CLI11_FOUND AND nlohmann_json_FOUND)
      set(LOGITLESS_BUILD_${part} ON)
    else()
      set(LOGITLESS_BUILD_${part} OFF)
      message(WARNING "Without the command line (${part}): CLI11 >= 2.1 or nlohmann-json >= 3.11 was not found")
    endif()
  endif()
endforeach()

# Called when the targets exist.
function(logitless_install_python)
  set_target_properties(logitless PROPERTIES VERSION "" SOVERSION "")
  set_property(TARGET logitless PROPERTY SOVERSION)
  set_property(TARGET logitless PROPERTY VERSION)
  install(TARGETS logitless LIBRARY DESTINATION logitless/lib COMPONENT python)
  if(TARGET logitless_cli)
    set_target_properties(logitless_cli PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
    install(TARGETS logitless_cli RUNTIME DESTINATION logitless/bin COMPONENT python)
  endif()
endfunction()
