"""Server and sites as programs: started, admitted, supervised and stopped.

launch              server and site with safe defaults
submit              `fedld run --engine flower`
control             what the operator does with a running server
server_app          the ServerApp: runs what was submitted
superlink           Flower's SuperLink: one port for sites, everything else on a Unix socket
supernode           Flower's SuperNode without a port
supervisor          starts Flower's daemons and, for every task, fedld and nothing else
admission           who may pass the sites' port
listener            bounds on connections, and calls that wait for work
unix_socket         a socket that only its owner opens
registrations       the operator's file of names and keys
registration_check  asks the server whether it knows a key
grid                replies, bounded before they are unfolded
keys                certificates and keys to begin with
log                 log files of server and sites
"""
