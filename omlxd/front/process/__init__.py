"""The daemon as a process: sockets, signals, logs, reload, the service manager.

Rule: process/ starts and ends front/app.py and knows no request.
"""
