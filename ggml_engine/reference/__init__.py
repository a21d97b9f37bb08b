"""For people who check engines: models by definition, cells by definition, libllama itself, and a look inside.

`naive` and `cells` share no code with what they check, but for the reading of files; nothing in the engine needs this
package. `check` puts them together, and is `ggml-engine check`.
"""
