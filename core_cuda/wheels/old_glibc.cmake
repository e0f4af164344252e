# Links libraries for an older glibc than this machine's, so that a wheel loads on older systems. libstdc++ is inside of
# each library, and what it takes from newer glibcs is defined in old_glibc.c.
set(DIPTYCH_OLD_GLIBC "" CACHE PATH "Folder with stub libraries of the glibc to link for (core_cuda/wheels/build.py)")
if(DIPTYCH_OLD_GLIBC)
  enable_language(C)
  add_library(old_glibc STATIC ${CMAKE_CURRENT_LIST_DIR}/old_glibc.c)
  target_compile_options(old_glibc PRIVATE -O2 -Wall -fvisibility=hidden -fPIC)
endif()

# PYTHON: the library is an extension module, whose symbols of Python its process defines.
function(diptych_link_old_glibc target)
  cmake_parse_arguments(PARSE_ARGV 1 given "PYTHON" "" "")
  if(NOT DIPTYCH_OLD_GLIBC)
    return()
  endif()
  target_link_options(${target} PRIVATE -nodefaultlibs)
  if(NOT given_PYTHON)
    target_link_options(${target} PRIVATE -Wl,-z,defs)
  endif()
  get_target_property(cudart ${target} CUDA_RUNTIME_LIBRARY)
  if(cudart STREQUAL "Static")  # CMake puts the machine's own -lrt -lpthread -ldl behind it
    set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)
    target_link_libraries(${target} PRIVATE -l:libcudart_static.a)
  endif()
  set(stubs ${DIPTYCH_OLD_GLIBC})
  target_link_libraries(${target} PRIVATE old_glibc -Wl,--start-group -l:libstdc++.a -l:libgcc.a
    $<TARGET_FILE:old_glibc> -Wl,--end-group -l:libgcc_s.so.1 ${stubs}/libc.so.6 ${stubs}/libm.so.6
    ${stubs}/libpthread.so.0 ${stubs}/libdl.so.2 ${stubs}/librt.so.1 ${stubs}/libld.so.2
    ${stubs}/libc_nonshared.a)
endfunction()
