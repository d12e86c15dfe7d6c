"""`qinfer generate -i IN -o OUT`: many prompts from a file, resumable after a crash.

`lines` reads the input, `parse` (with `native`, `openai` and `request`) makes requests of its
lines, `answer` runs them, `output` appends the results, `previous` and `sidecar` continue an
earlier run, and `run` joins them.
Nothing here knows how a model works.
"""
