-- KEYS: the policy (JSON). No ARGV.
return {'OK', redis.call('GET', KEYS[1])}
