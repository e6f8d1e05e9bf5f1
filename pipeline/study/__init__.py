"""Studies: the same stages under many settings, each a DVC experiment, compared in one table.

`plan` reads studies/NAME.yaml into cells, `order` says which waits for which, `cells` runs one, `mapping` where: here, on
Dask, or in a Prefect flow (`shown`) over Dask; `elsewhere` is what a worker on another machine needs. `compare` sets them
side by side, and `running` puts it all together.
"""
