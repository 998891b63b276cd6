"""TensorBoard pictures of cases and kernels, by callbacks that `conf/callbacks/default.yaml` names."""
