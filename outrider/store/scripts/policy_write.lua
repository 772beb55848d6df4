-- KEYS: the policy (JSON). ARGV: what it was when it was read, empty for none; what it becomes.
local was = redis.call('GET', KEYS[1]) or ''
if was ~= ARGV[2] then
  if was ~= ARGV[1] then
    return {'CHANGED'}
  end
  redis.call('SET', KEYS[1], ARGV[2])
end
return {'OK'}
