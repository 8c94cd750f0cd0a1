set(dspattn_cuda_source ${CMAKE_CURRENT_LIST_DIR}/../src/cuda)

# dspattn_head_dims(RESULT NAME): the head dims that kernels are compiled for, from the one place there is for them.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${dspattn_cuda_source}/tile/head_dims.h)
function(dspattn_head_dims result name)
  file(STRINGS ${dspattn_cuda_source}/tile/head_dims.h line REGEX " ${name}\\[\\] = ")
  string(REGEX REPLACE "^.* = " "" line "${line}")
  string(REGEX MATCHALL "[0-9]+" dims "${line}")
  if(NOT dims)
    message(FATAL_ERROR "src/cuda/tile/head_dims.h: expected a line with ${name}[] = {...}, found none")
  endif()
  set(${result} ${dims} PARENT_SCOPE)
endfunction()

# dspattn_unit(RESULT UNIT SOURCES...): the source UNIT, which includes the others, appended to RESULT. It names sources of
# its own folder and of src/cuda without the path to them: so ccache knows it again in another build folder.
function(dspattn_unit result unit)
  cmake_path(GET unit PARENT_PATH folder)
  set(included)
  foreach(source ${ARGN})
    string(REPLACE "${dspattn_cuda_source}/" "cuda/" source ${source})
    string(REPLACE "${folder}/" "" source ${source})
    string(APPEND included "#include \"${source}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${unit} CONTENT "${included}" @ONLY)
  set(${result} ${${result}} ${unit} PARENT_SCOPE)
endfunction()

# dspattn_joined(RESULT UNIT SOURCES...): where kernels are compiled to be tested without a GPU (DSPATTN_GPU_CODE), one
# unit of them: what all have in common takes nvcc three seconds each time. Elsewhere the sources themselves, which
# compile side by side.
function(dspattn_joined result unit)
  if(DSPATTN_GPU_CODE STREQUAL one)
    dspattn_unit(${result} ${unit} ${ARGN})
  else()
    list(APPEND ${result} ${ARGN})
  endif()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

# dspattn_general_instances(RESULT SUFFIX FOLDER): writes the instances of the general kernel into FOLDER, as sources that
# end in SUFFIX, all head dims in one, and lists them in RESULT. Joined are those that are compiled for the same card
# (dspattn_kernels).
function(dspattn_general_instances result suffix folder)
  set(sources)
  foreach(unit bf16_and_all:bf16-any-all,bf16-fours-brief,bf16-any-brief,bf16-fours-plain,bf16-any-plain,f16-any-all,f32-any-all,f32-precise-all
      f16_f32_plain:f32-pairs-plain,f32-any-plain,f32-precise-plain,f16-fours-brief,f16-any-brief,f16-fours-plain,f16-any-plain)
    string(REGEX MATCHALL "[a-z0-9]+-[a-z]+-[a-z]+" instances ${unit})
    string(REGEX REPLACE ":.*" "" unit ${unit})
    set(joined)
    foreach(instance ${instances})
      string(REPLACE "-" ";" parts ${instance})
      list(GET parts 0 DSPATTN_TYPE)
      list(GET parts 1 DSPATTN_KIND)
      list(GET parts 2 DSPATTN_SCOPE)
      set(source ${folder}/general_${DSPATTN_TYPE}_${DSPATTN_KIND}_${DSPATTN_SCOPE}${suffix})
      configure_file(${dspattn_cuda_source}/general/instance.cu.in ${source} @ONLY)
      list(APPEND joined ${source})
    endforeach()
    dspattn_joined(sources ${folder}/general_${unit}${suffix} ${joined})
  endforeach()
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# dspattn_general_backward_instances(RESULT SUFFIX FOLDER): and of its backward, with what runs before it.
function(dspattn_general_backward_instances result suffix folder)
  set(sources)
  foreach(instance bf16-any f16-any f32-any f32-precise)
    string(REPLACE "-" ";" parts ${instance})
    list(GET parts 0 DSPATTN_TYPE)
    list(GET parts 1 DSPATTN_KIND)
    set(source ${folder}/general_backward_${DSPATTN_TYPE}_${DSPATTN_KIND}${suffix})
    configure_file(${dspattn_cuda_source}/general/backward/instance.cu.in ${source} @ONLY)
    list(APPEND sources ${source})
  endforeach()
  list(FILTER sources EXCLUDE REGEX "_f(16|32)_")
  dspattn_joined(sources ${folder}/general_backward_f16_f32${suffix} ${folder}/general_backward_f16_any${suffix}
    ${dspattn_cuda_source}/general/backward/prepare.cu ${folder}/general_backward_f32_any${suffix}
    ${folder}/general_backward_f32_precise${suffix})
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# dspattn_sparse_instances(RESULT SUFFIX FOLDER TEMPLATE NAME): the instances of a kernel of one head dim, named after
# NAME and DSPATTN_DIM: of each selection, both types in one. Appended to RESULT.
function(dspattn_sparse_instances result suffix folder template name)
  foreach(DSPATTN_SELECTION two_of_four one_of_two)
    set(of_types)
    foreach(DSPATTN_TYPE bf16 f16)
      set(instance ${folder}/${name}_${DSPATTN_TYPE}_${DSPATTN_SELECTION}_${DSPATTN_DIM}.inc)
      configure_file(${template} ${instance} @ONLY)
      list(APPEND of_types ${instance})
    endforeach()
    dspattn_unit(${result} ${folder}/${name}_${DSPATTN_SELECTION}_${DSPATTN_DIM}${suffix} ${of_types})
  endforeach()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

# dspattn_joined_by(COUNT RESULT NAME SUFFIX SOURCES...): dspattn_joined() of every COUNT of the sources, in units NAME_0
# and so on: few, and none so long that one core is left with it at the end.
function(dspattn_joined_by count result name suffix)
  set(number 0)
  while(ARGN)
    list(SUBLIST ARGN 0 ${count} next)
    list(REMOVE_ITEM ARGN ${next})
    dspattn_joined(${result} ${name}_${number}${suffix} ${next})
    math(EXPR number "${number} + 1")
  endwhile()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

# dspattn_forward_instances(RESULT SUFFIX FOLDER): the instances of the fused forward kernels, those that take longest to
# compile first.
function(dspattn_forward_instances result suffix folder)
  set(of_sparse)
  set(of_means)
  set(of_tf32)
  dspattn_head_dims(dims kHeadDims)
  dspattn_head_dims(dims_of_means kGeneralHeadDims)
  list(SORT dims COMPARE NATURAL ORDER DESCENDING)
  foreach(DSPATTN_DIM ${dims})
    dspattn_sparse_instances(of_sparse ${suffix} ${folder} ${dspattn_cuda_source}/sm90/forward/instance.cu.in fused)
    # rest = mean: mean_dim() of sm90/common/variant.h.
    if(DSPATTN_DIM IN_LIST dims_of_means)
      dspattn_sparse_instances(of_means ${suffix} ${folder} ${dspattn_cuda_source}/sm90/forward/instance_mean.cu.in
        fused_mean)
    endif()
    set(instance ${folder}/fused_tf32_${DSPATTN_DIM}${suffix})
    configure_file(${dspattn_cuda_source}/sm90/forward_tf32/instance.cu.in ${instance} @ONLY)
    list(APPEND of_tf32 ${instance})
  endforeach()
  set(sources)
  # What runs before them is in namespace blocks: there names of the unnamed one serve a source each.
  dspattn_joined_by(7 sources ${folder}/fused_mean ${suffix} ${of_means} ${dspattn_cuda_source}/blocks/window_means.cu)
  dspattn_joined_by(7 sources ${folder}/fused ${suffix} ${of_sparse} ${dspattn_cuda_source}/blocks/schedule.cu)
  dspattn_joined_by(7 sources ${folder}/fused_tf32 ${suffix} ${of_tf32} ${dspattn_cuda_source}/blocks/prefix_means.cu)
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# dspattn_backward_instances(RESULT SUFFIX FOLDER): the same of the fused backward, with what runs before and after it.
function(dspattn_backward_instances result suffix folder)
  set(instances)
  set(of_bias)
  dspattn_head_dims(dims kBackwardHeadDims)
  foreach(DSPATTN_DIM ${dims})
    dspattn_sparse_instances(instances ${suffix} ${folder} ${dspattn_cuda_source}/sm90/backward/instance.cu.in backward)
    if(DSPATTN_DIM LESS_EQUAL 128)  # has_bias_kernel() of sm90/backward/config.h
      dspattn_sparse_instances(of_bias ${suffix} ${folder} ${dspattn_cuda_source}/sm90/backward/instance_bias.cu.in
        backward_bias)
    endif()
  endforeach()
  set(sources)
  set(backward ${dspattn_cuda_source}/sm90/backward)
  dspattn_joined_by(15 sources ${folder}/backward ${suffix} ${instances} ${of_bias}
    ${dspattn_cuda_source}/blocks/means.cu ${backward}/rows_kernels.cu ${backward}/mask_words.cu)
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# dspattn_decode_sources(RESULT SUFFIX FOLDER): the sources of the kernels for few queries, and of what is
# beside attention.
function(dspattn_decode_sources result suffix folder)
  set(from ${dspattn_cuda_source}/decode)
  set(sources)
  dspattn_joined(sources ${folder}/decode_f16_f32${suffix} ${from}/decode_f16.cu ${from}/decode_f32.cu)
  dspattn_joined(sources ${folder}/decode_bf16_ends${suffix} ${from}/decode_bf16.cu ${from}/merge.cu ${from}/room.cu
    ${dspattn_cuda_source}/blocks/value_sums.cu ${dspattn_cuda_source}/norm_rope/norm_rope.cu)
  set(${result} ${sources} PARENT_SCOPE)
endfunction()

# dspattn_pipeline_sources(RESULT HOPPER SUFFIX FOLDER): those of the pipeline, and in HOPPER its products with Hopper's
# own instructions.
function(dspattn_pipeline_sources result hopper suffix folder)
  set(from ${dspattn_cuda_source}/pipeline)
  set(sources)
  set(others ${from}/sm80/softmax.cu)
  foreach(type f16 f32)
    list(APPEND others ${from}/sm80/qk_prune_${type}.cu ${from}/sm80/pv_sparse_${type}.cu)
  endforeach()
  dspattn_joined(sources ${folder}/pipeline_bf16${suffix} ${from}/sm80/qk_prune_bf16.cu ${from}/sm80/pv_sparse_bf16.cu)
  dspattn_joined(sources ${folder}/pipeline_f16_f32${suffix} ${others})
  set(hopper_sources)
  dspattn_joined(hopper_sources ${folder}/pipeline_hopper${suffix} ${from}/sm90/qk_prune.cu ${from}/sm90/pv_sparse.cu)
  set(${result} ${sources} PARENT_SCOPE)
  set(${hopper} ${hopper_sources} PARENT_SCOPE)
endfunction()
