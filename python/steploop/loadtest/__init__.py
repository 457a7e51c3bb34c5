"""The load test: sends the requests of a workload to an engine or a server when they are due, and times what comes.

`target` is what is tested (`http_target`, `engine_target`), `open_loop` sends and waits, `record` has what happened to
each request, `figures` what that comes to, `text_report` and `plot` show it. `command` is `steploop bench`.
"""
