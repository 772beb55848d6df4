-- No ARGV.
if not known() then
  return {'NOT_FOUND'}
end
return {'OK', redis.call('HGETALL', KEYS[5])}
