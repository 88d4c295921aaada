"""Server and sites as programs: started, admitted, supervised and stopped.

launch         server and site with safe defaults, and their log files
control        the operator's side of a running server; `fedld run --engine flower`
server_app     the ServerApp: runs what was submitted
daemons        Flower's SuperLink with one port for sites, and its SuperNode without a port
supervisor     starts Flower's daemons, runs only fedld for every task, bounds replies
registrations  the operator's file of names and keys; admission of calls by these keys
listener       limits on connections, and calls that wait for work
unix_socket    a socket that only its owner opens
keys           certificates and keys to begin with
"""
