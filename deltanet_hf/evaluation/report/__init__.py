"""The report of `deltanet-hf report`: its models, their measurement, tables and figures."""
