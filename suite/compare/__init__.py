"""What differs between runs, and whether a change may pass.

``exact_figures`` the exact figures of a result: which there are, and which way is better
``snapshot``  what is compared of a run: verdicts, exact figures, ratios of times; never seconds
``baseline``  a snapshot as compact JSON, and whatever a RUN argument may name
``welch``     two ratios from two sessions or machines: the interval of their difference
``compare``   pure functions: two snapshots -> what is comparable, and what changed
``tables``    a comparison as tables: by implementation, strategy, backend or hardware
``formats``   tables as text, Markdown, CSV, JSON and one HTML page
``policy``    what breaks a gate, as a YAML file
``gate``      pure functions: comparison and policy -> findings
``gate_output`` findings as Markdown summary, JUnit XML and annotations
"""
