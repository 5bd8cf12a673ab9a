"""The definition of a pipeline: data, validated before anything runs."""
