-- No ARGV.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'NOT_FOUND'}
end
return {'OK', redis.call('HGETALL', KEYS[5])}
