"""Studies: the same stages under many settings, each a DVC experiment, compared in one table.

`reading` makes cells of studies/NAME.yaml (what they are is in `plan`, what is refused in `checks`), `order` says which waits
for which, `cells` runs one and reads its result (`nested` values too), `mapping` where: here, on Dask, or in a Prefect flow
(`shown`) over Dask; `elsewhere` is what a worker on another machine needs. `compare` sets them side by side, and `running`
puts it all together.
"""
