# What `cmake --install` does beside copying: the command, the module file and the job scripts.
# Read by CMakeLists.txt, which sets PYTHON, VERSION, SOURCE and the defaults of the site.

set(PREFIX "${CMAKE_INSTALL_PREFIX}")
set(LOADS "")
foreach(_module IN LISTS SITE_MODULES)
  string(APPEND LOADS "load(\"${_module}\")\n")
endforeach()
if(SITE_LIBMPI)
  string(APPEND LOADS "setenv(\"MPI4PY_LIBMPI\", \"${SITE_LIBMPI}\")\n")
endif()
configure_file("${SOURCE}/hpc_jobs/site/mpistrat.lua.in"
  "$ENV{DESTDIR}${PREFIX}/share/modulefiles/mpistrat/${VERSION}.lua" @ONLY)

# Not a script of pip: the package stands beside the environment, and takes all else from it.
set(_command "$ENV{DESTDIR}${PREFIX}/bin/mpistrat")
file(WRITE "${_command}" "#!/bin/sh
PYTHONPATH='${PREFIX}/lib/python'\${PYTHONPATH:+:\$PYTHONPATH} exec '${PYTHON}' -m mpistrat \"\$@\"
")
file(CHMOD "${_command}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE
  GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
get_filename_component(_bin "${PYTHON}" DIRECTORY)

# The defaults of the site stand first, so that what a script says itself comes after them.
set(_defaults "#!/bin/bash\n")
foreach(_option IN ITEMS partition account qos constraint)
  string(TOUPPER "SITE_${_option}" _name)
  if(${_name})
    string(APPEND _defaults "#SBATCH --${_option}=${${_name}}\n")
  endif()
endforeach()
# The environment is the one that this was installed with.
set(_environment "\nexport PATH='${PREFIX}/bin:${_bin}':\$PATH\n")
string(APPEND _environment "module use '${PREFIX}/share/modulefiles'\n")
string(APPEND _environment "module load mpistrat/${VERSION}\n")
set(_jobs "${PREFIX}/share/mpistrat/hpc_jobs")
file(GLOB _scripts "${SOURCE}/hpc_jobs/*.sbatch")
foreach(_script IN LISTS _scripts)
  get_filename_component(_name "${_script}" NAME)
  file(READ "${_script}" _text)
  string(REGEX REPLACE "^#!/bin/bash\n" "${_defaults}" _text "${_text}")
  string(REGEX REPLACE "\nsource [^\n]*bin/activate\"?\n" "${_environment}" _text "${_text}")
  string(REPLACE " hpc_jobs/sweep.py" " ${_jobs}/sweep.py" _text "${_text}")
  file(WRITE "$ENV{DESTDIR}${_jobs}/${_name}" "${_text}")
endforeach()
file(COPY "${SOURCE}/hpc_jobs/sweep.py" DESTINATION "$ENV{DESTDIR}${_jobs}")
message(STATUS "module use ${PREFIX}/share/modulefiles && module load mpistrat/${VERSION}")
