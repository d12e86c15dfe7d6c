"""`qinfer generate -i IN -o OUT`: many prompts from a file, resumable after a crash.

`lines` reads the input, `parse` (with `native`, `openai` and `request`) makes requests of its
lines, `answer` gives them to the model, `window` keeps those in flight, `output` appends the
results, `starting` (with `previous` and `sidecar`) continues an earlier run, `progress` counts, and
`run` joins them. Nothing here knows how a model works.
"""
